# SPDX-License-Identifier: Apache-2.0
"""AOTInductor as a backend: engines have a shared library of Inductor's C++ code; weights are constants."""

import os
import shutil
import subprocess
import sys
from functools import cache

import torch

from blade.backends.inductor.compile import compile_cluster
from blade.backends.inductor.ops import NAME, OPS
from blade.backends.shared.host_isa import for_this_cpu
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason
from blade.program.guard_program import guard_program
from blade.runtime.engine import make_engine

START_S, OP_S = 15.0, 0.1  # per conversion and per op, on two idle cores of 2024: mostly g++


class InductorBackend(Backend):
    """PyTorch's ahead-of-time compiler, on the CPU: optimizing needs a C++ compiler, running does not."""

    name = NAME

    @property
    def version(self) -> str:
        return f"{torch.__version__} {_compiler_version(_compiler() or '')}"

    def why_unavailable(self) -> str | None:
        if _compiler() is not None:
            return None
        return (
            f"AOTInductor compiles C++, and there is no {compiler_name()} on the PATH: "
            "`apt-get install g++`, or name a compiler in the environment variable CXX."
        )

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return OPS.why_not(node, config.cache)

    def estimate_s(self, cluster: Cluster) -> float:
        return START_S + OP_S * len(cluster.ops)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        compiled = compile_cluster(cluster)
        return make_engine(
            cluster.name,
            self.name,
            for_this_cpu(guard_program(cluster)),  # after the compilation, which adds guards
            compiled.package.to_bytes(),
            compiled.constants,
            {"max_failures": config.max_failures},
        )


def compiler_name() -> str:
    """The compiler that Inductor uses; importing its own setting would cost seconds and 100 MB."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def _compiler() -> str | None:
    return shutil.which(compiler_name())


@cache
def _compiler_version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]

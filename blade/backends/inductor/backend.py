# SPDX-License-Identifier: Apache-2.0
"""AOTInductor as a backend: a shared library of Inductor's C++ code in the engine, weights beside it."""

import os
import shutil
import subprocess
import sys
from functools import cache

import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.inductor.compile import compile_cluster
from blade.backends.inductor.ops import NAME, OPS
from blade.backends.inductor.run import load
from blade.backends.native_code import for_this_cpu
from blade.config import Config
from blade.exchange.guards import guard_program
from blade.reason import Reason
from blade.runtime.engine import make_engine, register_runner

START_S, OP_S = 15.0, 0.1  # of a conversion on two idle cores of 2024: mostly g++


class InductorBackend:
    """PyTorch's ahead-of-time compiler. CPU: needs a C++ compiler where it optimizes, none where it runs."""

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
            for_this_cpu(guard_program(cluster)),  # after compiling, which adds guards
            compiled.package.to_bytes(),
            compiled.constants,
            {"max_failures": config.max_failures},
        )


def compiler_name() -> str:
    """The compiler that Inductor asks for. Its own setting says the same, but costs seconds and 100 MB to import."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def _compiler() -> str | None:
    return shutil.which(compiler_name())


@cache
def _compiler_version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


register_runner(NAME, load)

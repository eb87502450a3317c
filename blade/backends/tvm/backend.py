# SPDX-License-Identifier: Apache-2.0
"""TVM as a backend: a cluster through Relax to a shared library, weights beside it."""

import importlib.util
import shutil

import torch

from blade.backends.archive import Archive
from blade.backends.base import Cluster, OpNode
from blade.backends.native_code import for_this_cpu
from blade.backends.tvm.compile import compile_cluster
from blade.backends.tvm.ops import NAME, why_not_op
from blade.backends.tvm.run import LIBRARY, load
from blade.backends.tvm.versions import INSTALL, stamp
from blade.config import Config
from blade.exchange.exported import output_orders
from blade.exchange.guards import guard_program
from blade.reason import Reason
from blade.runtime.engine import make_engine, register_runner

START_S, OP_S = 6.0, 0.1  # of a conversion on two idle cores of 2024: mostly importing


class TvmBackend:
    """Apache TVM, with schedules that need no search. CPU: links with a C++ compiler.

    It is not tuned, whatever ``Config.time_budget`` is: TVM's searches (MetaSchedule) measure programs of fixed
    sizes, and a cluster has symbols.
    """

    name = NAME
    note = "untuned: TVM's searches are for fixed sizes"

    @property
    def version(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in stamp().items())

    def why_unavailable(self) -> str | None:
        for package in ("tvm", "tvm_ffi"):
            if importlib.util.find_spec(package) is None:
                return f"TVM is not installed (there is no {package}): {INSTALL}."
        if not any(map(shutil.which, ("g++", "gcc", "clang++", "clang"))):
            return "TVM needs a compiler to link, g++ or clang++: `apt-get install g++`."
        return None

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_op(node)

    def estimate_s(self, cluster: Cluster) -> float:
        return START_S + OP_S * len(cluster.ops)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        orders = output_orders(cluster)
        compiled = compile_cluster(cluster)
        facts = {"weights": len(compiled.weights), "orders": orders}
        archive = Archive(stamp(), facts, {LIBRARY: compiled.library})
        return make_engine(
            cluster.name,
            self.name,
            for_this_cpu(guard_program(cluster)),
            archive.to_bytes(),
            [*compiled.weights, *compiled.folded],
            {"max_failures": config.max_failures},
        )


register_runner(NAME, load)

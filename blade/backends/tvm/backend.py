# SPDX-License-Identifier: Apache-2.0
"""TVM as a backend: it compiles a cluster through Relax to a shared library; weights are constants."""

import importlib.util
import shutil

import torch

from blade.backends.shared.archive import EngineArchive
from blade.backends.shared.host_isa import for_this_cpu
from blade.backends.tvm.compile import compile_cluster
from blade.backends.tvm.ops import NAME, why_not_op
from blade.backends.tvm.run import LIBRARY
from blade.backends.tvm.versions import INSTALL, stamp
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason
from blade.graph.fx.exported_program import output_orders
from blade.program.guard_program import guard_program
from blade.runtime.engine import make_engine

START_S, OP_S = 6.0, 0.1  # per conversion and per op, on two idle cores of 2024: mostly imports


class TvmBackend(Backend):
    """Apache TVM on the CPU, with schedules that need no search; it links with a C++ compiler.

    ``Config.time_budget`` is not used for tuning: TVM's search (MetaSchedule) measures programs of fixed
    sizes, but a cluster has symbolic sizes.
    """

    name = NAME
    summary = "untuned: TVM's searches are for fixed sizes"

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
        archive = EngineArchive(stamp(), facts, {LIBRARY: compiled.library})
        return make_engine(
            cluster.name,
            self.name,
            for_this_cpu(guard_program(cluster)),
            archive.to_bytes(),
            [*compiled.weights, *compiled.folded],
            {"max_failures": config.max_failures},
        )

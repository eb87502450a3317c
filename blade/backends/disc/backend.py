# SPDX-License-Identifier: Apache-2.0
"""DISC as a backend: which nodes it takes, and a cluster to an engine."""

from pathlib import Path

import numpy
import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.cpu import compile as cpu
from blade.backends.disc.cpu.target import host
from blade.backends.disc.support import why_not_op
from blade.cache import open_cache
from blade.config import Config
from blade.reason import Reason
from blade.runtime.engine import make_engine


class DiscBackend:
    """The dynamic-shape compiler. CPU: MLIR through LLVM, no compiler needed on the machine."""

    name = "disc"
    in_process = True  # what could crash is ours, and a process apart costs more than compiling

    @property
    def version(self) -> str:
        return cpu.compiler()

    def why_unavailable(self) -> str | None:
        return cpu.why_unavailable()

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_op(node)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        folder = None if config.dump_dir is None else Path(config.dump_dir) / cluster.name
        compiled = compile_graph(
            cluster.gm,
            cluster.shape_env,
            host(),
            folder,
            open_cache(config.cache),
            single=config.memory == "low",
            updates=cluster.updates,
        )
        code = torch.from_numpy(numpy.frombuffer(compiled.object, dtype=numpy.uint8).copy())
        limits = {"max_failures": config.max_failures, "watch_constants": int(cluster.live)}
        return make_engine(
            cluster.name, self.name, compiled.program, code, list(compiled.constants), limits
        )

# SPDX-License-Identifier: Apache-2.0
"""DISC as a backend: which nodes it takes, and a cluster to an engine."""

import logging
from pathlib import Path
from typing import Any

import numpy
import torch

from blade.backends.base import Cluster, OpNode, device_of
from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.cpu import compile as cpu
from blade.backends.disc.cpu.target import Target, host
from blade.backends.disc.gpu import available as gpu
from blade.backends.disc.gpu.target import GpuTarget, target_of
from blade.backends.disc.support import NAME, why_not_op
from blade.budget import output_error
from blade.cache import open_cache
from blade.config import Config
from blade.exchange.half import half_of
from blade.reason import Reason
from blade.runtime.engine import make_engine

log = logging.getLogger(__name__)

_COMPILERS = {"cpu": cpu.why_unavailable, "cuda": gpu.why_unavailable}


class DiscBackend:
    """The dynamic-shape compiler. CPU: MLIR through LLVM, no compiler needed on the machine; GPU: Triton."""

    name = NAME
    in_process = True  # what could crash is ours, and a process apart costs more than compiling

    @property
    def precisions(self) -> tuple[str, ...]:
        """Mixed precision is for GPUs, whose products are several times faster in 16 bits."""
        return () if gpu.why_unavailable() else ("fp16", "bf16")

    @property
    def lossy_with(self) -> tuple[str, ...]:
        return tuple(f"enable_{name}" for name in self.precisions)

    @property
    def version(self) -> str:
        return "\n".join([cpu.compiler(), gpu.compiler()])

    def why_unavailable(self) -> str | None:
        """``None`` if it can compile for any device here."""
        reasons = [why_unavailable() for why_unavailable in _COMPILERS.values()]
        return None if None in reasons else reasons[0]

    def expect(self, device: torch.device) -> None:
        """Triton's process imports while the model is captured."""
        if device.type == "cuda" and gpu.why_unavailable() is None:
            from blade.backends.disc.gpu import server

            server.expect(target_of(device))

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_op(node, _why_not_device)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        device = device_of(cluster)
        half = half_of(cluster, config) if device.type == "cuda" else None
        engine = self._engine(cluster, config, device, half)
        if half is not None and not _is_near(engine, cluster, config):
            log.info("%s: %s is too coarse for its products", cluster.name, half)
            engine = self._engine(cluster, config, device, None)
        return engine

    def _engine(
        self, cluster: Cluster, config: Config, device: torch.device, half: torch.dtype | None
    ) -> torch.ScriptObject:
        folder = None if config.dump_dir is None else Path(config.dump_dir) / cluster.name
        compiled = compile_graph(
            cluster.gm,
            cluster.shape_env,
            _target(device),
            folder,
            open_cache(config.cache),
            single=config.memory == "low",
            updates=cluster.updates,
            half=half,
        )
        code = torch.from_numpy(numpy.frombuffer(compiled.object, dtype=numpy.uint8).copy())
        limits = {"max_failures": config.max_failures, "watch_constants": int(cluster.live)}
        if device.type == "cuda":
            limits["cuda_graphs"] = int(config.cuda_graphs)
            limits["reuse_output_buffers"] = int(config.reuse_output_buffers)
        return make_engine(
            cluster.name, self.name, compiled.program, code, list(compiled.constants), limits
        )


def _is_near(engine: Any, cluster: Cluster, config: Config) -> bool:
    """Whether a lossy engine keeps to the budget at the samples; where it does not answer, others will tell."""
    budget = config.accuracy_budget
    if budget.kind == "metric":
        return True
    with torch.no_grad():
        for sample in cluster.samples:
            got = engine.try_execute(list(sample))
            pairs = [] if got is None else zip(got, cluster.gm(*sample), strict=True)
            if not all(budget.allows(output_error(a, b)) for a, b in pairs):
                return False
    return True


def _target(device: torch.device) -> Target | GpuTarget:
    return target_of(device) if device.type == "cuda" else host()


def _why_not_device(device: torch.device) -> str | None:
    """``None`` where code for ``device`` can be compiled and run here."""
    why_unavailable = _COMPILERS.get(device.type)
    return f"no code generator for {device}" if why_unavailable is None else why_unavailable()

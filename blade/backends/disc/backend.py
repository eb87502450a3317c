# SPDX-License-Identifier: Apache-2.0
"""DISC as a backend: the ops it supports, and how a cluster becomes an engine."""

import logging
from pathlib import Path
from typing import Any

import numpy
import torch

from blade.backends.disc.compiler import CompiledProgram, compile_graph
from blade.backends.disc.cpu.compile import parallel as cpu
from blade.backends.disc.frontend.support import NAME, why_not_op
from blade.backends.disc.gpu import available as gpu
from blade.backends.disc.gpu_variants import with_targets
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.backends.disc.target.gpu import GpuTarget, target_of
from blade.backends.shared.half_precision import half_of
from blade.config import Config
from blade.config.accuracy import output_error
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode, device_of
from blade.core.disk_cache import open_cache
from blade.core.reason import Reason
from blade.report.layer_notes import with_kernel_ops, with_left_targets
from blade.runtime.engine import make_engine

log = logging.getLogger(__name__)

_COMPILERS = {"cpu": cpu.why_unavailable, "cuda": gpu.why_unavailable}


class DiscBackend(Backend):
    """The dynamic-shape compiler: MLIR and LLVM for CPUs, without a compiler installed; Triton for GPUs."""

    name = NAME
    in_process = True  # a child process would cost more than compiling does
    sizes_from_elements = True
    takes_loops = True
    watches_constants = True  # its engines notice writes that no version counter tells of

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those in which products are faster: 16 bits on GPUs, bfloat16 on CPUs with an instruction for it."""
        if gpu.why_unavailable() is None:
            return ("fp16", "bf16")
        has_bf16 = cpu.why_unavailable() is None and host().has_bf16_products
        return ("bf16",) if has_bf16 else ()

    @property
    def reduced_precision_with(self) -> tuple[str, ...]:
        return tuple(f"enable_{name}" for name in self.precisions)

    @property
    def version(self) -> str:
        return "\n".join([cpu.compiler(), gpu.compiler()])

    def why_unavailable(self) -> str | None:
        """``None`` if DISC can compile for at least one device of this machine."""
        reasons = [why_unavailable() for why_unavailable in _COMPILERS.values()]
        return None if None in reasons else reasons[0]

    def warm_up(self, device: torch.device) -> None:
        """Start the import of Triton in its process while the model is captured."""
        if device.type == "cuda" and gpu.why_unavailable() is None:
            from blade.backends.disc.gpu.compile import server

            server.warm_up(target_of(device))

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_op(node, _why_not_device)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        device = device_of(cluster)
        half = _half(cluster, config, device)
        engine = self._engine(cluster, config, device, half)
        if half is None or _is_near(engine, cluster, config):
            return engine
        log.info("%s: %s is too coarse for all of its products", cluster.name, half)
        return self._partly(cluster, config, device, half)

    def _partly(
        self, cluster: Cluster, config: Config, device: torch.device, half: torch.dtype
    ) -> torch.ScriptObject:
        """An engine with as many products in ``half`` as the accuracy budget allows; on a GPU, with none."""
        engine, low, high = None, 0, 1 if device.type == "cuda" else 16
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._engine(cluster, config, device, half, middle)
            if _is_near(tried, cluster, config):
                engine, low = tried, middle
            else:
                high = middle
        log.info("%s: %d sixteenths of its products are in %s", cluster.name, low, half)
        return self._engine(cluster, config, device, None) if engine is None else engine

    def _engine(
        self,
        cluster: Cluster,
        config: Config,
        device: torch.device,
        half: torch.dtype | None,
        sixteenths: int = 16,
    ) -> torch.ScriptObject:
        folder = None if config.dump_dir is None else Path(config.dump_dir) / cluster.name
        cache = open_cache(config.cache)

        def compile_for(
            target: CpuTarget | GpuTarget, folder: Path | None = None
        ) -> CompiledProgram:
            return compile_graph(
                cluster.gm,
                cluster.shape_env,
                target,
                folder,
                cache,
                single=config.memory == "low",
                updates=cluster.updates,
                half=half,
                sixteenths=sixteenths,
                folds=not cluster.live and config.memory != "low",
            )

        target = _target(device)
        compiled, left = compile_for(target, folder), dict[str, str]()
        if isinstance(target, GpuTarget):
            compiled, left = with_targets(compiled, target, config.gpu_targets, compile_for)
        code = torch.from_numpy(numpy.frombuffer(compiled.object, dtype=numpy.uint8).copy())
        limits = {"max_failures": config.max_failures, "watch_constants": int(cluster.live)}
        if device.type == "cuda":
            limits["cuda_graphs"] = int(config.cuda_graphs)
            limits["reuse_output_buffers"] = int(config.reuse_output_buffers)
        program = with_kernel_ops(compiled.program, compiled.kernel_ops)
        program = with_left_targets(program, left)
        constants = [c if cluster.live else aligned(c) for c in compiled.constants]
        return make_engine(cluster.name, self.name, program, code, constants, limits)


_ALIGNMENT = 16
"""Bytes; the runtime refuses constants of an accelerator that begin elsewhere."""


def aligned(constant: torch.Tensor) -> torch.Tensor:
    """``constant``, or a copy with its strides if it is a view that begins where a GPU's kernels cannot read it."""
    if constant.device.type == "cpu" or constant.data_ptr() % _ALIGNMENT == 0:
        return constant
    strides = constant.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(constant.shape, strides, strict=True)):
        return constant  # nothing can be written to it
    copy = torch.empty_strided(
        constant.shape, strides, dtype=constant.dtype, device=constant.device
    )
    return copy.copy_(constant)


def _half(cluster: Cluster, config: Config, device: torch.device) -> torch.dtype | None:
    """The dtype that float32 products may be computed in on ``device``; ``None``: float32 only."""
    if device.type == "cuda":
        return half_of(cluster, config)
    return torch.bfloat16 if config.enable_bf16 and host().has_bf16_products else None


def _is_near(engine: Any, cluster: Cluster, config: Config) -> bool:
    """Whether a reduced-precision engine keeps the accuracy budget at the samples.

    A sample that the engine refuses does not count: verification reports it.
    """
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


def _target(device: torch.device) -> CpuTarget | GpuTarget:
    return target_of(device) if device.type == "cuda" else host()


def _why_not_device(device: torch.device) -> str | None:
    """``None`` if code for ``device`` can be compiled and run on this machine."""
    why_unavailable = _COMPILERS.get(device.type)
    return f"no code generator for {device}" if why_unavailable is None else why_unavailable()

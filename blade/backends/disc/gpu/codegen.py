# SPDX-License-Identifier: Apache-2.0
"""Codegen for the GPU: fusion groups become Triton functions, library instructions ATen's ops or ours."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy
import torch

from blade.backends.disc.fusion.build_kernels import GroupKernel, build_kernel, build_put
from blade.backends.disc.fusion.fuse import Fused, FusionGroup
from blade.backends.disc.gpu.attention.autotune import choose_kernels
from blade.backends.disc.gpu.compile.compile import InMemoryStore, KernelStore, compile_units
from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, TritonUnit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.emit.library_launch import AtenCall, LibraryLaunch
from blade.backends.disc.gpu.gemm.autotune import choose_plans
from blade.backends.disc.gpu.library.batch_launches import batch_launches
from blade.backends.disc.gpu.library.library import LibraryLaunches, Served
from blade.backends.disc.gpu.passes.pipeline import FORMS, passes
from blade.backends.disc.gpu.passes.precompute_constants import pack_units
from blade.backends.disc.ir.graph import Graph, Value
from blade.backends.disc.ir.kernel import ACCUMULATIONS, Accumulate, Kernel
from blade.backends.disc.passes.pipeline import GraphPass
from blade.backends.disc.program.buffer_reuse import overwritable
from blade.backends.disc.program.instructions import (
    AttentionCall,
    Instruction,
    Launch,
    LibraryCall,
    LoopCall,
)
from blade.backends.disc.target.capabilities import TargetCapabilities
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.disk_cache import DiskCache


class GpuCodegen:
    """Compiles every distinct function once: equal layers of a model share their code."""

    device = "cuda"
    language = "triton"

    def __init__(self, target: GpuTarget, half: torch.dtype | None = None) -> None:
        self.target = target
        self.half = half
        self.emitted: dict[Kernel, tuple[LaunchChoice, ...]] = {}
        self.units: dict[str, TritonUnit] = {}
        self.store: KernelStore = InMemoryStore()

    @property
    def isa(self) -> Sequence[str]:
        return ("cuda", *self.target.isa)

    @property
    def forms(self) -> TargetCapabilities:
        return FORMS

    @property
    def passes(self) -> Sequence[tuple[str, GraphPass]]:
        return passes(self.half)

    @property
    def kernels(self) -> int:
        return len(self.emitted)

    def packed_only(self, graph: Graph) -> set[int]:
        """Empty: a value that is computed once is a value of the graph (precompute_constants.py)."""
        return set()

    def group(self, built: GroupKernel, kind: str) -> list[Instruction]:
        return [*self._launches(built)]

    def _launches(self, built: GroupKernel) -> list[Launch]:
        kernel = built.kernel
        place = {buffer.id: k for k, buffer in enumerate(built.buffers)}
        pairs = overwritable(kernel, built.buffers)
        over = tuple((place[read.id], place[written.id]) for read, written in pairs)
        filled = tuple(
            (stmt.access.arg, ACCUMULATIONS[stmt.kind])
            for stmt in kernel.body
            if isinstance(stmt, Accumulate) and stmt.kind in ACCUMULATIONS
        )
        return [
            Launch(
                self._noted(choice.unit).name,
                choice.grid,
                built.buffers,
                kernel.sizes(),
                over,
                choice.when,
                filled,
            )
            for choice in self._choices(kernel)
        ]

    def prepare(self, fused: Fused, cache: DiskCache | None) -> None:
        self.store = InMemoryStore() if cache is None else cache
        self.served = LibraryLaunches(fused, self.target)
        units = [*self._certain(fused)]
        products, facts = self.served.products, fused.facts
        self.served.plans = choose_plans(products, self.target, facts, self.store, units)
        attentions = [v for v in fused.graph.values if v.op == "attention"]
        self.served.kernels = choose_kernels(attentions, self.target, facts, self.store)

    def _certain(self, fused: Fused) -> Iterator[TritonUnit]:
        """The code that is needed regardless of the choices."""
        for unit in fused.units:
            if isinstance(unit, Value):
                served = self.served.certain(unit)
                yield from (s.choice.unit for s in served if isinstance(s, LibraryLaunch))
            elif self.served.follows(unit) is None:
                yield from (
                    choice.unit for choice in self._choices(build_kernel(unit, fused).kernel)
                )
        yield from pack_units(fused.graph)

    def _choices(self, kernel: Kernel) -> tuple[LaunchChoice, ...]:
        if kernel not in self.emitted:
            self.emitted[kernel] = emit(kernel, self.target)
        return self.emitted[kernel]

    def product(self, group: FusionGroup, built: GroupKernel) -> list[Instruction] | None:
        found = self.served.group(group)
        if found is None:
            return None
        steps: list[Instruction] = []
        for step in found:
            steps.append(self._step(step))
            if isinstance(step, AtenCall):
                steps += [_under(step.when, s) for s in self._launches(built)]
        return steps

    def library(self, value: Value) -> list[Instruction]:
        if value.op == "written":
            return [*self._launches(build_put(value))]
        found = self.served.value(value)
        return [value] if found is None else [self._step(step) for step in found]

    def _step(self, step: Served) -> Instruction:
        if isinstance(step, AttentionCall):
            return step
        if isinstance(step, AtenCall):
            return step.value if step.when is None else LibraryCall(step.value, step.when)
        choice = step.choice
        name = self._noted(choice.unit).name
        return Launch(name, choice.grid, step.operands, step.ints, when=choice.when)

    def finish(self, fused: Fused, steps: Sequence[Instruction]) -> Sequence[Instruction]:
        for unit in pack_units(fused.graph):
            self._noted(unit)
        steps = batch_launches(steps, dict(self.units), self._noted)
        used = {*_names(fused, steps)}
        self.units = {k: v for k, v in self.units.items() if k in used}
        return steps

    def text(self) -> str:
        return "\n".join(unit.text for unit in self.units.values())

    def compile(self, cache: DiskCache | None) -> bytes:
        return compile_units(tuple(self.units.values()), self.target, self.store)

    def _noted(self, unit: TritonUnit) -> TritonUnit:
        return self.units.setdefault(unit.name, unit)


def _names(fused: Fused, steps: Sequence[Instruction]) -> Iterator[str]:
    """The functions that ``steps`` launch and that pack constants, in loops too."""
    yield from (unit.name for unit in pack_units(fused.graph))
    for step in steps:
        if isinstance(step, Launch):
            yield step.name
        elif isinstance(step, LoopCall):
            yield from _names(step.body, step.steps)


def _under(when: sympy.Basic | None, launch: Launch) -> Launch:
    """``launch`` with ``when`` as an additional condition."""
    if when is None:
        return launch
    return replace(launch, when=when if launch.when is None else sympy.And(when, launch.when))

# SPDX-License-Identifier: Apache-2.0
"""The compiler's target GPU: groups become Triton functions, library instructions ATen's ops or ours."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy
import torch

from blade.backends.disc.forms import Forms
from blade.backends.disc.fuse import Fused, Group
from blade.backends.disc.gpu.attention_choice import choose_kernels
from blade.backends.disc.gpu.batch import batch
from blade.backends.disc.gpu.choose import choose
from blade.backends.disc.gpu.compile import Kept, Memory, compile_units
from blade.backends.disc.gpu.constants import pack_units
from blade.backends.disc.gpu.emit import emit
from blade.backends.disc.gpu.launch import ByAten, LibraryLaunch
from blade.backends.disc.gpu.library import Library, Served
from blade.backends.disc.gpu.passes import FORMS, passes
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.unit import Choice, Unit
from blade.backends.disc.inplace import overwritable
from blade.backends.disc.ir import Graph, Value
from blade.backends.disc.kernel import Kernel
from blade.backends.disc.kernels import GroupKernel, build_kernel
from blade.backends.disc.passes import Pass
from blade.backends.disc.steps import AttentionCall, Launch, LibraryCall, Step
from blade.cache import Cache


class GpuGenerator:
    """Every distinct function once: equal layers of a model share their code."""

    device = "cuda"
    language = "triton"

    def __init__(self, target: GpuTarget, half: torch.dtype | None = None) -> None:
        self.target = target
        self.half = half
        self.emitted: dict[Kernel, tuple[Choice, ...]] = {}
        self.units: dict[str, Unit] = {}
        self.store: Kept = Memory()

    @property
    def isa(self) -> Sequence[str]:
        return ("cuda", *self.target.isa)

    @property
    def forms(self) -> Forms:
        return FORMS

    @property
    def passes(self) -> Sequence[tuple[str, Pass]]:
        return passes(self.half)

    @property
    def kernels(self) -> int:
        return len(self.emitted)

    def absorbed(self, graph: Graph) -> set[int]:
        """Nothing: what is computed once is a value of its own (gpu/constants.py)."""
        return set()

    def group(self, built: GroupKernel, kind: str) -> list[Step]:
        return [*self._launches(built)]

    def _launches(self, built: GroupKernel) -> list[Launch]:
        kernel = built.kernel
        place = {buffer.id: k for k, buffer in enumerate(built.buffers)}
        pairs = overwritable(kernel, built.buffers)
        over = tuple((place[read.id], place[written.id]) for read, written in pairs)
        return [
            Launch(
                self._noted(choice.unit).name,
                choice.grid,
                built.buffers,
                kernel.sizes(),
                over,
                choice.when,
            )
            for choice in self._choices(kernel)
        ]

    def prepare(self, fused: Fused, cache: Cache | None) -> None:
        self.store = Memory() if cache is None else cache
        self.served = Library(fused, self.target)
        units = [*self._certain(fused)]
        products, facts = self.served.products, fused.facts
        self.served.plans = choose(products, self.target, facts, self.store, units)
        attentions = [v for v in fused.graph.values if v.op == "attention"]
        self.served.kernels = choose_kernels(attentions, self.target, facts, self.store)

    def _certain(self, fused: Fused) -> Iterator[Unit]:
        """The code that is needed whatever is chosen."""
        for unit in fused.units:
            if isinstance(unit, Value):
                served = self.served.certain(unit)
                yield from (s.choice.unit for s in served if isinstance(s, LibraryLaunch))
            elif self.served.follows(unit) is None:
                yield from (
                    choice.unit for choice in self._choices(build_kernel(unit, fused).kernel)
                )
        yield from pack_units(fused.graph)

    def _choices(self, kernel: Kernel) -> tuple[Choice, ...]:
        if kernel not in self.emitted:
            self.emitted[kernel] = emit(kernel, self.target)
        return self.emitted[kernel]

    def product(self, group: Group, built: GroupKernel) -> list[Step] | None:
        found = self.served.group(group)
        if found is None:
            return None
        steps: list[Step] = []
        for step in found:
            steps.append(self._step(step))
            if isinstance(step, ByAten):
                steps += [_under(step.when, s) for s in self._launches(built)]
        return steps

    def library(self, value: Value) -> list[Step]:
        found = self.served.value(value)
        return [value] if found is None else [self._step(step) for step in found]

    def _step(self, step: Served) -> Step:
        if isinstance(step, AttentionCall):
            return step
        if isinstance(step, ByAten):
            return step.value if step.when is None else LibraryCall(step.value, step.when)
        choice = step.choice
        name = self._noted(choice.unit).name
        return Launch(name, choice.grid, step.operands, step.ints, when=choice.when)

    def finish(self, fused: Fused, steps: Sequence[Step]) -> Sequence[Step]:
        for unit in pack_units(fused.graph):
            self._noted(unit)
        steps = batch(steps, dict(self.units), self._noted)
        launched = {step.name for step in steps if isinstance(step, Launch)}
        packed = {unit.name for unit in pack_units(fused.graph)}
        self.units = {k: v for k, v in self.units.items() if k in launched or k in packed}
        return steps

    def text(self) -> str:
        return "\n".join(unit.text for unit in self.units.values())

    def compile(self, cache: Cache | None) -> bytes:
        return compile_units(tuple(self.units.values()), self.target, self.store)

    def _noted(self, unit: Unit) -> Unit:
        return self.units.setdefault(unit.name, unit)


def _under(when: sympy.Basic | None, launch: Launch) -> Launch:
    """``launch`` where ``when`` holds, too."""
    if when is None:
        return launch
    return replace(launch, when=when if launch.when is None else sympy.And(when, launch.when))

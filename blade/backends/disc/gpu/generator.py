# SPDX-License-Identifier: Apache-2.0
"""The compiler's target GPU: groups become Triton functions, library instructions ATen's ops or ours."""

from collections.abc import Sequence

import torch

from blade.backends.disc.forms import Forms
from blade.backends.disc.fuse import Fused
from blade.backends.disc.gpu.compile import compile_units
from blade.backends.disc.gpu.constants import pack_units
from blade.backends.disc.gpu.emit import emit
from blade.backends.disc.gpu.passes import FORMS, passes
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.unit import Choice, Unit
from blade.backends.disc.inplace import overwritable
from blade.backends.disc.ir import Graph, Value
from blade.backends.disc.kernel import Kernel
from blade.backends.disc.kernels import GroupKernel
from blade.backends.disc.passes import Pass
from blade.backends.disc.steps import Launch, Step
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
        kernel = built.kernel
        if kernel not in self.emitted:
            self.emitted[kernel] = emit(kernel, self.target)
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
            for choice in self.emitted[kernel]
        ]

    def library(self, value: Value) -> list[Step]:
        return [value]

    def finish(self, fused: Fused) -> None:
        for unit in pack_units(fused.graph):
            self._noted(unit)

    def text(self) -> str:
        return "\n".join(unit.text for unit in self.units.values())

    def compile(self, cache: Cache | None) -> bytes:
        return compile_units(tuple(self.units.values()), self.target, cache)

    def _noted(self, unit: Unit) -> Unit:
        return self.units.setdefault(unit.name, unit)

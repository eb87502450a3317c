# SPDX-License-Identifier: Apache-2.0
"""The compiler's target CPU: groups and library instructions become MLIR, and that native code."""

from collections.abc import Sequence
from dataclasses import replace

from blade.backends.disc.cpu.compile import compile_kernels
from blade.backends.disc.cpu.emit import Emitted, emit
from blade.backends.disc.cpu.native import native
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.forms import CPU, Forms
from blade.backends.disc.fuse import Fused, Group
from blade.backends.disc.inplace import overwritable
from blade.backends.disc.ir import Graph, Value
from blade.backends.disc.kernel import Kernel
from blade.backends.disc.kernels import GroupKernel
from blade.backends.disc.legalize import absorbed
from blade.backends.disc.passes import PASSES, Pass
from blade.backends.disc.steps import KernelCall, Step
from blade.cache import Cache, digest


class CpuGenerator:
    """Every distinct kernel once: equal layers of a model share their code."""

    device = "cpu"
    language = "mlir"

    def __init__(self, target: Target) -> None:
        self.target = target
        self.emitted: dict[Kernel, tuple[str, Emitted]] = {}
        self.libraries: dict[str, str] = {}  # generated code that serves every shape, by name

    @property
    def isa(self) -> Sequence[str]:
        return self.target.isa

    @property
    def forms(self) -> Forms:
        return CPU

    @property
    def passes(self) -> Sequence[tuple[str, Pass]]:
        return PASSES

    @property
    def kernels(self) -> int:
        return len(self.emitted)

    def absorbed(self, graph: Graph) -> set[int]:
        return absorbed(graph)

    def prepare(self, fused: Fused, cache: Cache | None) -> None:
        """Nothing is decided over a whole program."""

    def product(self, group: Group, built: GroupKernel) -> list[Step] | None:
        """What follows a product is in it by then (conv_epilogue.py, epilogue.py), or runs by itself."""
        return None

    def group(self, built: GroupKernel, kind: str) -> list[Step]:
        kernel = built.kernel
        if kernel not in self.emitted:
            self.emitted[kernel] = self._emit(kernel, kind)
        name, emitted = self.emitted[kernel]
        return [
            KernelCall(
                name,
                emitted.extent,
                emitted.cost,
                emitted.scratch,
                built.buffers,
                kernel.sizes(),
                overwritable(kernel, built.buffers),
            )
        ]

    def library(self, value: Value) -> list[Step]:
        """Generated library code for ``value`` if there is any, else ATen's."""
        found = native(value, self.target)
        if found is None:
            return [value]
        for name, text in found.code:
            self.libraries.setdefault(name, text)
        return [*found.before, found.call]

    def finish(self, fused: Fused, steps: Sequence[Step]) -> Sequence[Step]:
        """As they are: packing kernels come with the calls that read what they pack."""
        return steps

    def text(self) -> str:
        return "\n".join(text for _, text in self._texts())

    def compile(self, cache: Cache | None) -> bytes:
        return compile_kernels(self._texts(), self.target, cache)

    def _emit(self, kernel: Kernel, kind: str) -> tuple[str, Emitted]:
        """Named by content: models share the code of equal kernels, in the cache and in one process."""
        emitted = emit(kernel, "kernel", self.target)
        name = f"{kind}_{digest([emitted.text])[:12]}"
        text = emitted.text.replace("llvm.func @kernel(", f"llvm.func @{name}(", 1)
        return name, replace(emitted, text=text)

    def _texts(self) -> list[tuple[str, str]]:
        """(name, MLIR) of everything to compile; kernels that differ in symbols only are one."""
        return list({**{n: e.text for n, e in self.emitted.values()}, **self.libraries}.items())

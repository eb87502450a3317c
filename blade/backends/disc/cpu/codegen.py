# SPDX-License-Identifier: Apache-2.0
"""Codegen for the CPU: fusion groups and library instructions become MLIR, then native code."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from blade.backends.disc.cpu.compile.parallel import compile_kernels
from blade.backends.disc.cpu.emit.kernel import EmittedKernel, emit
from blade.backends.disc.cpu.library_kernels import NativeKernel, native_kernel
from blade.backends.disc.fusion.build_kernels import GroupKernel
from blade.backends.disc.fusion.fuse import Fused, FusionGroup
from blade.backends.disc.ir.graph import Graph, Value
from blade.backends.disc.ir.kernel import Kernel
from blade.backends.disc.passes.legalize import absorbed
from blade.backends.disc.passes.pipeline import GraphPass, passes
from blade.backends.disc.program.buffer_reuse import overwritable
from blade.backends.disc.program.instructions import (
    Instruction,
    KernelCall,
    NativeCall,
    PackedBuffer,
)
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities
from blade.backends.disc.target.cpu import CpuTarget
from blade.core.disk_cache import DiskCache, digest


class CpuCodegen:
    """Compiles every distinct kernel once: equal layers of a model share their code."""

    device = "cpu"
    language = "mlir"

    def __init__(
        self, target: CpuTarget, half: torch.dtype | None = None, sixteenths: int = 16
    ) -> None:
        """``half``: bfloat16 if it may replace float32, in so many of every 16 products."""
        self.target, self._passes = target, passes(half, sixteenths)
        self.emitted: dict[Kernel, tuple[str, EmittedKernel]] = {}
        self.libraries: dict[str, str] = {}  # generated code for all shapes, by name

    @property
    def isa(self) -> Sequence[str]:
        return self.target.isa

    @property
    def forms(self) -> TargetCapabilities:
        return CPU

    @property
    def passes(self) -> Sequence[tuple[str, GraphPass]]:
        return self._passes

    @property
    def kernels(self) -> int:
        return len(self.emitted)

    def packed_only(self, graph: Graph) -> set[int]:
        return absorbed(graph)

    def prepare(self, fused: Fused, cache: DiskCache | None) -> None:
        """Do nothing: the CPU makes no decision over a whole program."""

    def product(self, group: FusionGroup, built: GroupKernel) -> list[Instruction] | None:
        """None: earlier passes fused epilogues into products; the rest are kernels of their own."""
        return None

    def group(self, built: GroupKernel, kind: str) -> list[Instruction]:
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

    def library(self, value: Value) -> list[Instruction]:
        """Generated library code for ``value`` if it exists, else ATen's."""
        found = native_kernel(value, self.target)
        if found is None:
            return [value]
        found = _packed_by_content(found)
        for name, text in found.code:
            self.libraries.setdefault(name, text)
        return [*found.before, found.call]

    def finish(self, fused: Fused, steps: Sequence[Instruction]) -> Sequence[Instruction]:
        """Return ``steps`` unchanged: packing kernels come with the calls that read packed buffers."""
        return steps

    def text(self) -> str:
        return "\n".join(text for _, text in self._texts())

    def compile(self, cache: DiskCache | None) -> bytes:
        return compile_kernels(self._texts(), self.target, cache)

    def _emit(self, kernel: Kernel, kind: str) -> tuple[str, EmittedKernel]:
        """Name a kernel by its content, so that models share equal kernels in the cache and the process."""
        emitted = emit(kernel, "kernel", self.target)
        name = f"{kind}_{digest([emitted.text])[:12]}"
        text = emitted.text.replace("llvm.func @kernel(", f"llvm.func @{name}(", 1)
        return name, replace(emitted, text=text)

    def _texts(self) -> list[tuple[str, str]]:
        """(name, MLIR) of all code to compile; kernels that differ only in symbols share one entry."""
        return list({**{n: e.text for n, e in self.emitted.values()}, **self.libraries}.items())


def _packed_by_content(native: NativeKernel) -> NativeKernel:
    """``native`` with packing kernels named by their content, by which the runtime knows equal buffers
    of several engines.
    """
    texts = dict(native.code)
    calls = (*native.before, native.call)
    packed = {o.kernel for call in calls for o in call.operands if isinstance(o, PackedBuffer)}
    names = {name: f"{name}_{digest([texts[name]])[:12]}" for name in packed}

    def renamed(call: NativeCall) -> NativeCall:
        operands = (
            replace(o, kernel=names[o.kernel]) if isinstance(o, PackedBuffer) else o
            for o in call.operands
        )
        return replace(call, operands=tuple(operands))

    code = tuple(
        (names[name], text.replace(f"@{name}(", f"@{names[name]}("))
        if name in names
        else (name, text)
        for name, text in native.code
    )
    return NativeKernel(renamed(native.call), code, tuple(map(renamed, native.before)))

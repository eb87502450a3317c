# SPDX-License-Identifier: Apache-2.0
"""The compiler, a flat sequence of named steps: FX graph in, program text and native code out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.cpu.compile import compile_kernels
from blade.backends.disc.cpu.emit import Emitted, emit
from blade.backends.disc.cpu.native import native
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.fuse import Fused, Group, fuse
from blade.backends.disc.inplace import overwritable
from blade.backends.disc.ir import Graph, Value
from blade.backends.disc.kernel import Kernel
from blade.backends.disc.kernels import GroupKernel, build_copy, build_kernel
from blade.backends.disc.legalize import absorbed
from blade.backends.disc.lower import lower
from blade.backends.disc.passes import PASSES
from blade.backends.disc.places import home, starts
from blade.backends.disc.program import KernelCall, NativeCall, Step, write_program
from blade.backends.disc.updates import updates_last
from blade.backends.disc.views import view_of
from blade.cache import Cache, digest

log = logging.getLogger(__name__)
Dump = Callable[[str, object], None]


@dataclass(frozen=True)
class Compiled:
    """What the executor needs: program text, an archive of ELF objects, the constants' tensors."""

    program: str
    object: bytes
    constants: tuple[torch.Tensor, ...]
    kernels: int


def compile_graph(
    gm: GraphModule,
    shape_env: ShapeEnv,
    target: Target,
    dump_dir: Path | None = None,
    cache: Cache | None = None,
    single: bool = False,
    updates: Sequence[int] = (),
) -> Compiled:
    """Compile a straight-line FX graph; raises ``Refused`` for what has no form in DISC.

    ``single``: weights are read as they are, never packed, so that there is no second copy of one.
    ``updates``: inputs that take the last outputs, which are not returned.
    """
    return compile_ir(lower(gm, shape_env, single, updates), target, dump_dir, cache)


def compile_ir(
    graph: Graph, target: Target, dump_dir: Path | None = None, cache: Cache | None = None
) -> Compiled:
    """Everything after lowering."""
    dump = _dumper(dump_dir)
    dump("lower", graph)
    for name, run_pass in PASSES:
        graph = run_pass(graph)
        dump(name, graph)
    fused = updates_last(fuse(graph))
    dump("fuse", fused)
    kernels = _Kernels(target)
    packed = absorbed(graph)
    steps = [
        step
        for unit in fused.units
        if isinstance(unit, Group) or unit.id not in packed
        for step in _steps(unit, fused, kernels)
    ]
    dump("mlir", "\n".join(text for _, text in kernels.texts()))
    code = compile_kernels(kernels.texts(), target, cache)
    devices = ["cpu"] * len(graph.inputs)
    program = write_program(fused, steps, target.isa, devices)
    dump("program", program)
    return Compiled(program, code, graph.constants, len(kernels.emitted))


class _Kernels:
    """Every distinct kernel once: equal layers of a model share their code."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.emitted: dict[Kernel, tuple[str, Emitted]] = {}
        self.libraries: dict[str, str] = {}  # generated code that serves every shape, by name

    def call(self, built: GroupKernel, kind: str) -> KernelCall:
        kernel = built.kernel
        if kernel not in self.emitted:
            self.emitted[kernel] = self._emit(kernel, kind)
        name, emitted = self.emitted[kernel]
        return KernelCall(
            name,
            emitted.extent,
            emitted.cost,
            emitted.scratch,
            built.buffers,
            kernel.sizes(),
            overwritable(kernel, built.buffers),
        )

    def _emit(self, kernel: Kernel, kind: str) -> tuple[str, Emitted]:
        """Named by content: models share the code of equal kernels, in the cache and in one process."""
        emitted = emit(kernel, "kernel", self.target)
        name = f"{kind}_{digest([emitted.text])[:12]}"
        text = emitted.text.replace("llvm.func @kernel(", f"llvm.func @{name}(", 1)
        return name, replace(emitted, text=text)

    def native(self, value: Value) -> NativeCall | None:
        """The generated library code for ``value``, if there is any."""
        found = native(value, self.target)
        if found is None:
            return None
        for name, text in found.code:
            self.libraries.setdefault(name, text)
        return found.call

    def texts(self) -> list[tuple[str, str]]:
        """(name, MLIR) of everything to compile; kernels that differ in symbols only are one."""
        return list({**{n: e.text for n, e in self.emitted.values()}, **self.libraries}.items())


def _steps(unit: Group | Value, fused: Fused, kernels: _Kernels) -> list[Step]:
    if isinstance(unit, Group):
        return [kernels.call(build_kernel(unit, fused), unit.kind)]
    if unit.op != "concat":
        return [kernels.native(unit) or unit]
    copies: list[Step] = []
    for part, start in zip(unit.args, starts(unit), strict=True):
        view = view_of(part)
        if view is None or view.base.id not in fused.placed:
            copy = build_copy(part, home(unit, fused.placed), unit.attrs["axis"], start)
            copies.append(kernels.call(copy, "copy"))
    return copies


def _dumper(folder: Path | None) -> Dump:
    counter = iter(range(1000))

    def dump(name: str, content: object) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{next(counter):02d}_{name}.txt"
            path.write_text(f"{content}\n", encoding="utf-8")

    return dump

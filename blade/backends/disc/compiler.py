# SPDX-License-Identifier: Apache-2.0
"""The compiler as a flat sequence of named steps: FX graph in, program text and native code out.

All targets share this sequence. A ``Codegen`` holds the differences: the passes, how a fusion group or a
library op becomes instructions of the program, and how code is compiled.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from sympy import sympify
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.build_kernels import (
    GroupKernel,
    build_copy,
    build_kernel,
    join_copies,
)
from blade.backends.disc.fusion.fuse import (
    Fused,
    FusionGroup,
    FusionUnit,
    fuse,
)
from blade.backends.disc.fusion.shorten_lives import shorten_lives
from blade.backends.disc.ir.concat_placement import buffer_of, operand_offsets
from blade.backends.disc.ir.graph import Graph, Value, contiguous_strides, plain
from blade.backends.disc.ir.kernel import Compute, Reduce
from blade.backends.disc.ir.loop import body_of, loops, own_results
from blade.backends.disc.ir.views import StridedView, view_of
from blade.backends.disc.passes.pipeline import GraphPass
from blade.backends.disc.program.input_updates import updates_last
from blade.backends.disc.program.instructions import Instruction, KernelCall, Launch, LoopCall
from blade.backends.disc.program.writer import NUMBER, write_program
from blade.backends.disc.target.capabilities import TargetCapabilities
from blade.backends.disc.target.cpu import CpuTarget
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.disk_cache import DiskCache

log = logging.getLogger(__name__)
Dump = Callable[[str, object], None]


class Codegen(Protocol):
    """Everything that the compiler needs to know about a target; collects the code of one program."""

    device: str  # device type that the program runs on
    language: str  # language of the code, for dumps

    @property
    def isa(self) -> Sequence[str]:
        """Features that a machine must have to run the program, as in its `isa` line."""

    @property
    def forms(self) -> TargetCapabilities:
        """Capabilities that lowering may use."""

    @property
    def passes(self) -> Sequence[tuple[str, GraphPass]]:
        """Names and passes between lowering and fusion."""

    def packed_only(self, graph: Graph) -> set[int]:
        """Ids of values that exist only in packed weights and are not computed at run time."""

    def prepare(self, fused: Fused, cache: DiskCache | None) -> None:
        """Make decisions that concern the whole program; called before any instruction is made."""

    def product(self, group: FusionGroup, built: GroupKernel) -> list[Instruction] | None:
        """The instructions of a library op and its following group if one kernel computes both;
        else ``None``.
        """

    def group(self, built: GroupKernel, kind: str) -> list[Instruction]:
        """The instructions that run a fusion group; ``kind`` becomes part of the kernel's name."""

    def library(self, value: Value) -> list[Instruction]:
        """The instructions of a library op."""

    def finish(self, fused: Fused, steps: Sequence[Instruction]) -> Sequence[Instruction]:
        """All instructions, some perhaps joined; adds the code that belongs to no single instruction."""

    def text(self) -> str:
        """The generated code so far."""

    def compile(self, cache: DiskCache | None) -> bytes:
        """The object code of the program."""

    @property
    def kernels(self) -> int:
        """Number of different fusion groups."""


@dataclass(frozen=True)
class CompiledProgram:
    """Input of the executor: program text, an archive of native code, the constants' tensors.

    ``kernel_ops`` tells for reports what each fused kernel computes, by the name the program calls it.
    """

    program: str
    object: bytes
    constants: tuple[torch.Tensor, ...]
    kernels: int
    kernel_ops: Mapping[str, str] = field(default_factory=dict)


def compile_graph(
    gm: GraphModule,
    shape_env: ShapeEnv,
    target: CpuTarget | GpuTarget,
    dump_dir: Path | None = None,
    cache: DiskCache | None = None,
    single: bool = False,
    updates: Sequence[int] = (),
    half: torch.dtype | None = None,
    sixteenths: int = 16,
    folds: bool = False,
) -> CompiledProgram:
    """Compile a straight-line FX graph; raises ``Refused`` for ops that DISC cannot express.

    ``single``: weights are never packed, so that no second copy of one exists.
    ``half``: float16 or bfloat16, in which float32 products may be computed; on a CPU bfloat16, in so many
    ``sixteenths`` of them.
    ``updates``: inputs that the last outputs are written to; those outputs are not returned.
    ``folds``: constants never change, so that what is computed from them alone may be computed now.
    """
    generator = _codegen(target, half, sixteenths)
    graph = lower(gm, shape_env, single, updates, generator.forms, folds)
    devices = _places(
        [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"], generator.device
    )
    return _compile(graph, generator, devices, dump_dir, cache)


def _places(inputs: Sequence[torch.Tensor], device: str) -> list[str]:
    """The devices of ``inputs``; on one that is not the CPU, a tensor of the CPU without dimensions is a number."""
    given = [one.device.type for one in inputs]
    if device not in given:
        return [device] * len(given)
    here = device != "cpu"
    return [
        NUMBER if here and place == "cpu" and not one.dim() else place
        for place, one in zip(given, inputs, strict=True)
    ]


def compile_ir(
    graph: Graph,
    target: CpuTarget | GpuTarget,
    dump_dir: Path | None = None,
    cache: DiskCache | None = None,
    half: torch.dtype | None = None,
) -> CompiledProgram:
    """Compile a lowered graph."""
    generator = _codegen(target, half)
    return _compile(graph, generator, [generator.device] * len(graph.inputs), dump_dir, cache)


def _codegen(
    target: CpuTarget | GpuTarget, half: torch.dtype | None, sixteenths: int = 16
) -> Codegen:
    """The target's codegen. Only its modules are imported: there are many."""
    if isinstance(target, GpuTarget):
        from blade.backends.disc.gpu.codegen import GpuCodegen

        return GpuCodegen(target, half)
    from blade.backends.disc.cpu.codegen import CpuCodegen

    return CpuCodegen(target, half, sixteenths)


def _compile(
    graph: Graph,
    generator: Codegen,
    devices: Sequence[str],
    dump_dir: Path | None,
    cache: DiskCache | None,
) -> CompiledProgram:
    """``devices``: one per input; in a GPU program, an input on the CPU is a number or provides sizes alone."""
    dump = _dumper(dump_dir)
    dump("lower", graph)
    ops: dict[str, str] = {}
    fused, joined = _scheduled(graph, generator, cache, ops, dump)
    dump(generator.language, generator.text())
    code = generator.compile(cache)
    program = write_program(fused, joined, generator.isa, devices)
    dump("program", program)
    return CompiledProgram(program, code, fused.graph.constants, generator.kernels, ops)


def _scheduled(
    graph: Graph,
    generator: Codegen,
    cache: DiskCache | None,
    ops: dict[str, str],
    dump: Dump,
    is_body: bool = False,
) -> tuple[Fused, Sequence[Instruction]]:
    """``graph`` after all passes, fused, and its instructions; ``ops`` learns what each kernel computes."""
    for name, run_pass in generator.passes:
        graph = own_results(graph) if is_body and name == "outputs" else run_pass(graph)
        dump(name, graph)
    bodies: dict[int, LoopCall] = {}
    for loop in loops(graph):
        body = body_of(loop)
        nested = replace(body.graph, constants=graph.constants, facts=graph.facts)
        inner, inside = _scheduled(nested, generator, cache, ops, dump, is_body=True)
        graph = replace(graph, constants=inner.graph.constants)
        bodies[loop.id] = LoopCall(loop, inner, inside)
    fused = updates_last(shorten_lives(fuse(graph, generator.device != "cpu")))
    dump("fuse", fused)
    generator.prepare(fused, cache)
    absorbed = generator.packed_only(graph)
    units = [u for u in fused.units if isinstance(u, FusionGroup) or u.id not in absorbed]
    steps = [step for run in _runs(units) for step in _steps(run, fused, generator, ops, bodies)]
    return fused, generator.finish(fused, steps)


def _runs(units: Sequence[FusionUnit]) -> Iterator[list[FusionUnit]]:
    """Runs of adjacent concatenations and writes; every other unit by itself."""
    for joins, found in groupby(units, _is_copied):
        run = [*found]
        yield from [run] if joins else [[unit] for unit in run]


def _is_copied(unit: FusionUnit) -> bool:
    """Whether ``unit`` is made by copies: a concatenation, or a write to a region of an input."""
    if not isinstance(unit, Value):
        return False
    return unit.op == "concat" or (unit.op == "written" and "starts" in unit.attrs)


def _steps(
    run: Sequence[FusionUnit],
    fused: Fused,
    generator: Codegen,
    ops: dict[str, str],
    bodies: Mapping[int, LoopCall],
) -> list[Instruction]:
    """The steps of ``run``; ``ops`` learns what each kernel computes. ``bodies``: loops by their ids."""
    [unit, *_] = run
    if isinstance(unit, Value) and unit.op == "loop":
        return [bodies[unit.id]]
    if isinstance(unit, FusionGroup):
        built = build_kernel(unit, fused)
        steps = generator.product(unit, built)
        if steps is None:
            steps = generator.group(built, unit.kind)
            ops.update((s.name, _ops(built)) for s in steps if isinstance(s, KernelCall | Launch))
        return steps
    if not _is_copied(unit):
        return generator.library(unit)
    copies = [copy for u in run if isinstance(u, Value) for copy in copies_of(u, fused)]
    return [step for c in join_copies(copies) for step in generator.group(c, "copy")]


def _ops(built: GroupKernel) -> str:
    """``add, rsqrt, row sum``: each op of the kernel once, in order; ``row`` marks reductions."""
    found = [
        s.op if isinstance(s, Compute) else f"row {s.kind}"
        for s in built.kernel.body
        if isinstance(s, Compute | Reduce)
    ]
    return ", ".join(dict.fromkeys(op for op in found if op != "cast")) or "copy"


def copies_of(unit: Value, fused: Fused) -> Iterator[GroupKernel]:
    """Copies of those parts of a concatenation that were not computed in its buffer, or of what is written."""
    if unit.op == "written":
        strides = contiguous_strides(unit.shape)
        first = sum(sympify(a) * b for a, b in zip(unit.attrs["starts"], strides, strict=True))
        yield build_copy(unit.args[0], StridedView(unit, strides, plain(first)), 0, 0)
        return
    for part, start in zip(unit.args, operand_offsets(unit), strict=True):
        view = view_of(part)
        is_there = view is not None and (
            view.base.id in fused.placed or (unit.id, view.base.id) in fused.repeated
        )
        if not is_there:
            yield build_copy(part, buffer_of(unit, fused.placed), unit.attrs["axis"], start)


def _dumper(folder: Path | None) -> Dump:
    counter = iter(range(1000))

    def dump(name: str, content: object) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{next(counter):02d}_{name}.txt"
            path.write_text(f"{content}\n", encoding="utf-8")

    return dump

# SPDX-License-Identifier: Apache-2.0
"""The compiler, a flat sequence of named steps: FX graph in, program text and native code out.

One sequence for all targets. What differs between them is in a ``Generator``: the passes, how a fusion
group or a library instruction becomes steps of the program, and how code is compiled.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.cpu.target import Target
from blade.backends.disc.forms import Forms
from blade.backends.disc.fuse import Fused, Group, Unit, fuse
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.ir import Graph, Value
from blade.backends.disc.kernels import GroupKernel, build_copy, build_kernel, join_copies
from blade.backends.disc.lower import lower
from blade.backends.disc.passes import Pass
from blade.backends.disc.places import home, starts
from blade.backends.disc.program import write_program
from blade.backends.disc.steps import Step
from blade.backends.disc.updates import updates_last
from blade.backends.disc.views import view_of
from blade.cache import Cache

log = logging.getLogger(__name__)
Dump = Callable[[str, object], None]


class Generator(Protocol):
    """Everything the compiler has to know of one target; it collects the code of one program."""

    device: str  # where it computes
    language: str  # of the code, for dumps

    @property
    def isa(self) -> Sequence[str]:
        """What a machine must have to run the program, as its `isa` line says it."""

    @property
    def forms(self) -> Forms:
        """What lowering may use."""

    @property
    def passes(self) -> Sequence[tuple[str, Pass]]:
        """Between lowering and fusion."""

    def absorbed(self, graph: Graph) -> set[int]:
        """Ids of values that exist in packed weights only: nothing computes them at run time."""

    def prepare(self, fused: Fused, cache: Cache | None) -> None:
        """Asked before any step is made: what has to be decided over the whole program."""

    def product(self, group: Group, built: GroupKernel) -> list[Step] | None:
        """The steps of a library instruction and the group that follows it, if they are one kernel."""

    def group(self, built: GroupKernel, kind: str) -> list[Step]:
        """The steps that run a fusion group; ``kind`` is what to call it."""

    def library(self, value: Value) -> list[Step]:
        """The steps of a library instruction."""

    def finish(self, fused: Fused, steps: Sequence[Step]) -> Sequence[Step]:
        """Asked once all steps are made, which it may join: adds the code of what is no step."""

    def text(self) -> str:
        """The code so far."""

    def compile(self, cache: Cache | None) -> bytes:
        """The program's object."""

    @property
    def kernels(self) -> int:
        """How many different fusion groups there are."""


@dataclass(frozen=True)
class Compiled:
    """What the executor needs: program text, an archive of native code, the constants' tensors."""

    program: str
    object: bytes
    constants: tuple[torch.Tensor, ...]
    kernels: int


def compile_graph(
    gm: GraphModule,
    shape_env: ShapeEnv,
    target: Target | GpuTarget,
    dump_dir: Path | None = None,
    cache: Cache | None = None,
    single: bool = False,
    updates: Sequence[int] = (),
    half: torch.dtype | None = None,
) -> Compiled:
    """Compile a straight-line FX graph; raises ``Refused`` for what has no form in DISC.

    ``single``: weights are read as they are, never packed, so that there is no second copy of one.
    ``half``: float16 or bfloat16, in which products of float32 may be computed on a GPU.
    ``updates``: inputs that take the last outputs, which are not returned.
    """
    generator = _generator(target, half)
    graph = lower(gm, shape_env, single, updates, generator.forms)
    given = [n.meta["val"].device.type for n in gm.graph.nodes if n.op == "placeholder"]
    devices = given if generator.device in given else [generator.device] * len(given)
    return _compile(graph, generator, devices, dump_dir, cache)


def compile_ir(
    graph: Graph,
    target: Target | GpuTarget,
    dump_dir: Path | None = None,
    cache: Cache | None = None,
    half: torch.dtype | None = None,
) -> Compiled:
    """Everything after lowering."""
    generator = _generator(target, half)
    return _compile(graph, generator, [generator.device] * len(graph.inputs), dump_dir, cache)


def _generator(target: Target | GpuTarget, half: torch.dtype | None) -> Generator:
    """The modules of the other one are not imported: they are many."""
    if isinstance(target, GpuTarget):
        from blade.backends.disc.gpu.generator import GpuGenerator

        return GpuGenerator(target, half)
    from blade.backends.disc.cpu.generator import CpuGenerator

    return CpuGenerator(target)


def _compile(
    graph: Graph,
    generator: Generator,
    devices: Sequence[str],
    dump_dir: Path | None,
    cache: Cache | None,
) -> Compiled:
    """``devices``: one per input; one on the CPU may have nothing but sizes for a program of a GPU."""
    dump = _dumper(dump_dir)
    dump("lower", graph)
    for name, run_pass in generator.passes:
        graph = run_pass(graph)
        dump(name, graph)
    fused = updates_last(fuse(graph))
    dump("fuse", fused)
    generator.prepare(fused, cache)
    absorbed = generator.absorbed(graph)
    units = [u for u in fused.units if isinstance(u, Group) or u.id not in absorbed]
    steps = [step for run in _runs(units) for step in _steps(run, fused, generator)]
    joined = generator.finish(fused, steps)
    dump(generator.language, generator.text())
    code = generator.compile(cache)
    program = write_program(fused, joined, generator.isa, devices)
    dump("program", program)
    return Compiled(program, code, graph.constants, generator.kernels)


def _runs(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Neighbouring concatenations together, everything else by itself."""
    for joins, found in groupby(units, lambda u: isinstance(u, Value) and u.op == "concat"):
        run = [*found]
        yield from [run] if joins else [[unit] for unit in run]


def _steps(run: Sequence[Unit], fused: Fused, generator: Generator) -> list[Step]:
    [unit, *_] = run
    if isinstance(unit, Group):
        built = build_kernel(unit, fused)
        steps = generator.product(unit, built)
        return generator.group(built, unit.kind) if steps is None else steps
    if unit.op != "concat":
        return generator.library(unit)
    copies = [copy for u in run if isinstance(u, Value) for copy in copies_of(u, fused)]
    return [step for c in join_copies(copies) for step in generator.group(c, "copy")]


def copies_of(unit: Value, fused: Fused) -> Iterator[GroupKernel]:
    """What brings the parts of a concatenation where they belong, and are not computed there."""
    for part, start in zip(unit.args, starts(unit), strict=True):
        view = view_of(part)
        if view is None or view.base.id not in fused.placed:
            yield build_copy(part, home(unit, fused.placed), unit.attrs["axis"], start)


def _dumper(folder: Path | None) -> Dump:
    counter = iter(range(1000))

    def dump(name: str, content: object) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{next(counter):02d}_{name}.txt"
            path.write_text(f"{content}\n", encoding="utf-8")

    return dump

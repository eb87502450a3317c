# SPDX-License-Identifier: Apache-2.0
"""A program for GPU run on CPU tensors: launches by Triton's interpreter, calls by torch.

    outputs = compile_to_program(graph)(x, y)

Plain and slow; what the C++ executor does beyond it is memory and speed. Memory nobody wrote to is NaN, or
as large a number as there is, and what `reuse` says is done, so that a wrong plan shows in the values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton_interpreter import launch

from blade.backends.disc import compiler
from blade.backends.disc.gpu import codegen as generator
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.target.gpu import GpuTarget
from blade.program.dtypes import DTYPES

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_OPS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "gt": lambda a, b: int(a > b),
    "ge": lambda a, b: int(a >= b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}


class GuardFailed(Exception):
    """The original would run."""


@dataclass(frozen=True)
class GpuProgram:
    """A program with its functions as text: nothing is compiled for a GPU."""

    text: str
    units: Mapping[str, TritonUnit]
    constants: tuple[torch.Tensor, ...]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return run_program(self.text, self.units, inputs, self.constants)

    def ran(self, *inputs: torch.Tensor) -> list[str]:
        """What ``inputs`` make it run, in order: the kind of function that is launched, or the ATen op."""
        return self.traced(*inputs)[1]

    def traced(self, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[str]]:
        """The outputs, and what ran."""
        run = _Run(self.text, self.units, inputs, self.constants)
        return run.run(), run.ran


def compile_to_program(graph: Graph, half: torch.dtype | None = None) -> GpuProgram:
    """``graph`` for an H100."""
    return _noted(lambda: compiler.compile_ir(graph, GpuTarget(), half=half))


def compile_graph_to_program(
    gm: torch.fx.GraphModule,
    shape_env: ShapeEnv,
    updates: Sequence[int] = (),
    half: torch.dtype | None = None,
) -> GpuProgram:
    """``gm`` for an H100."""
    target = GpuTarget()
    return _noted(lambda: compiler.compile_graph(gm, shape_env, target, updates=updates, half=half))


def _noted(compile_: Callable[[], compiler.CompiledProgram]) -> GpuProgram:
    units: dict[str, TritonUnit] = {}

    def note(given: Sequence[TritonUnit], *_: object) -> bytes:
        units.update((unit.name, unit) for unit in given)
        return b""

    with mock.patch.object(generator, "compile_units", note):
        compiled = compile_()
    return GpuProgram(compiled.program, units, compiled.constants)


def run_program(
    program: str,
    units: Mapping[str, TritonUnit],
    inputs: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """The outputs of ``program``; raises ``GuardFailed`` where these sizes are not served."""
    return _Run(program, units, inputs, constants).run()


def _section(lines: Sequence[str], name: str) -> list[str]:
    for at, line in enumerate(lines):
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return list(lines[at + 1 : at + 1 + int(words[1])])
    return []


class _Run:
    def __init__(
        self,
        program: str,
        units: Mapping[str, TritonUnit],
        inputs: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
    ) -> None:
        self.lines = program.splitlines()
        self.units = units
        self.inputs = [t.contiguous() for t in inputs]
        self.constants = list(constants)
        self.registers: list[int] = []
        self.slots: list[torch.Tensor | None] = []
        self.kinds: list[list[str]] = []
        self.ran: list[str] = []

    def run(self) -> list[torch.Tensor]:
        for line in _section(self.lines, "registers"):
            self.register(line.split()[2:])
        for line in _section(self.lines, "guards"):
            if not self.registers[int(line.split()[1])]:
                raise GuardFailed(line)
        for line in _section(self.lines, "packs"):
            self.pack(line.split()[1:])
        for line in _section(self.lines, "slots"):
            self.kinds.append(line.split()[2:])
            self.slots.append(self.slot(self.kinds[-1]))
        for line in _section(self.lines, "instructions"):
            self.instruction(line.split())
        words = next(line for line in self.lines if line.startswith("outputs ")).split()
        return [self.tensor(int(w)) for w in words[2:]]

    def register(self, words: Sequence[str]) -> None:
        op, *rest = words
        if op == "dim":
            value = self.inputs[int(rest[0])].shape[int(rest[1])]
        elif op == "const":
            value = int(rest[0])
        elif op == "scale":
            value = int(self.registers[int(rest[0])] * float(rest[1]))
        else:
            value = _OPS[op](self.registers[int(rest[0])], self.registers[int(rest[1])])
        self.registers.append(value)

    def pack(self, words: Sequence[str]) -> None:
        name, dtype, count, fills = words[0], _DTYPES[words[1]], int(words[2]), int(words[3])
        result = torch.zeros(count, dtype=dtype)
        rest = iter(map(int, words[4:]))
        for _ in range(fills):
            constant, extent, ints = next(rest), next(rest), next(rest)
            numbers = [next(rest) for _ in range(ints)]
            self.launch(name, (extent, 1, 1), [self.constants[constant], result], numbers)
        self.constants.append(result)

    def slot(self, words: Sequence[str]) -> torch.Tensor | None:
        kind, *rest = words
        if kind in ("input", "update"):
            return self.inputs[int(rest[0])]
        if kind == "const":
            return self.constants[int(rest[0])]
        if kind == "dyn":
            return None
        if kind == "view":
            return None
        dtype, rank = _DTYPES[rest[0]], int(rest[1])
        shape = [self.registers[int(r)] for r in rest[2 : 2 + rank]]
        if "reuse" in rest:
            other = self.slots[int(rest[-1])]
            assert other is not None
            made = _garbage(shape, dtype)
            if made.numel() * made.itemsize == other.numel() * other.itemsize and made.numel():
                return other.view(-1).view(dtype).view(shape)
            return made
        return _garbage(shape, dtype)

    def tensor(self, k: int) -> torch.Tensor:
        """A slot, views of it as they are now."""
        found = self.slots[k]
        if found is not None:
            return found
        kind, *rest = self.kinds[k]
        assert kind == "view", f"slot {k} is read before it is written"
        base, rank = self.tensor(int(rest[0])), int(rest[1])
        numbers = [self.registers[int(r)] for r in rest[2:]]
        sizes, strides, offset = numbers[:rank], numbers[rank : 2 * rank], numbers[-1]
        return torch.as_strided(base, sizes, strides, base.storage_offset() + offset)

    def instruction(self, words: Sequence[str]) -> None:
        if words[0] == "when":
            if not self.registers[int(words[1])]:
                return
            words = words[2:]
        self.ran.append(words[1] if words[0] == "call" else words[1].rpartition("_")[0])
        if words[0] == "call":
            self.call(words[1], words[2:])
            return
        assert words[0] == "launch", words
        name, rest = words[1], [int(w) for w in words[2:]]
        grid = tuple(self.registers[r] for r in rest[:3])
        count = rest[3]
        pointers = [self.tensor(k) for k in rest[4 : 4 + count]]
        ints = [self.registers[r] for r in rest[5 + count :]]
        assert len(ints) == rest[4 + count]
        self.launch(name, grid, pointers, ints)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        pointers: Sequence[torch.Tensor],
        ints: Sequence[int],
    ) -> None:
        unit = self.units[name]
        names = [n for n, _ in unit.signature]
        assert len(names) == len(pointers) + len(ints), (unit.signature, pointers, ints)
        launch(unit, grid, pointers, ints)

    def call(self, name: str, words: Sequence[str]) -> None:
        op, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, op.removeprefix("aten::")), overload or "default")
        count = int(words[0])
        args = [self.argument(w) for w in words[1 : 1 + count]]
        arguments = target._schema.arguments
        named = {a.name: x for a, x in zip(arguments, args, strict=False) if a.kwarg_only}
        results = target(*args[: len(args) - len(named)], **named)
        slots = words[2 + count :]
        assert len(slots) == int(words[1 + count])
        several = results if isinstance(results, (tuple, list)) else [results]
        for slot, result in zip(slots, several, strict=False):
            if slot != "-":
                self.slots[int(slot)] = self.expected(int(slot), result)

    def expected(self, k: int, result: torch.Tensor) -> torch.Tensor:
        """``result`` with the strides that slot ``k`` says."""
        _, dtype, rank, *rest = self.kinds[k]
        numbers = [self.registers[int(r)] for r in rest]
        sizes, strides = numbers[: int(rank)], numbers[int(rank) :]
        assert list(result.shape) == sizes and result.dtype == _DTYPES[dtype], (result, sizes)
        if list(result.stride()) == strides:
            return result
        made = torch.empty_strided(sizes, strides, dtype=result.dtype)
        return made.copy_(result)

    def argument(self, word: str) -> Any:
        kind, _, text = word.partition(":")
        if kind == "n":
            return None
        parts = [p for p in text.split(",") if p]
        simple: dict[str, Callable[[], Any]] = {
            "t": lambda: self.tensor(int(text)),
            "r": lambda: self.registers[int(text)],
            "i": lambda: int(text),
            "f": lambda: float(text),
            "b": lambda: text == "1",
            "s": lambda: text,
            "d": lambda: torch.device("cpu"),
            "dt": lambda: _DTYPES[text],
            "lt": lambda: [self.tensor(int(p)) for p in parts],
            "lo": lambda: [None if p == "n" else self.tensor(int(p)) for p in parts],
            "li": lambda: [self.registers[int(p[1:])] if p[0] == "r" else int(p) for p in parts],
            "lf": lambda: [float(p) for p in parts],
            "lb": lambda: [p == "1" for p in parts],
        }
        return simple[kind]()


def _garbage(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(list(shape), torch.nan, dtype=dtype)
    return torch.full(
        list(shape), True if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype
    )

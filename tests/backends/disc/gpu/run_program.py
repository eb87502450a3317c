# SPDX-License-Identifier: Apache-2.0
"""A program for GPU run on CPU tensors: launches by Triton's interpreter, calls by torch.

    outputs = compile_to_program(graph)(x, y)

Plain and slow; what the C++ executor does beyond it is memory and speed. Memory nobody wrote to is NaN, or
as large a number as there is, and what `reuse` says is done, so that a wrong plan shows in the values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def compile_to_program(
    graph: Graph, half: torch.dtype | None = None, target: GpuTarget | None = None
) -> GpuProgram:
    """``graph`` for ``target``, an H100 unless it is given."""
    return _noted(lambda: compiler.compile_ir(graph, target or GpuTarget(), half=half))


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
        self.registers: list[int | None] = []  # None: not known yet
        self.slots: list[torch.Tensor | None] = []
        self.kinds: list[list[str]] = []
        self.ran: list[str] = []

    def run(self) -> list[torch.Tensor]:
        self.registers = [None] * len(_section(self.lines, "registers"))
        self.learn({})
        for line in _section(self.lines, "packs"):
            self.pack(line.split()[1:])
        for line in _section(self.lines, "slots"):
            self.kinds.append(line.split()[2:])
            self.slots.append(self.slot(self.kinds[-1]))
        self.instructions(_section(self.lines, "instructions"))
        words = next(line for line in self.lines if line.startswith("outputs ")).split()
        return [self.tensor(int(w)) for w in words[2:]]

    def instructions(self, lines: Sequence[str]) -> None:
        rest = list(lines)
        while rest:
            words = rest.pop(0).split()
            if words[0] != "loop":
                self.instruction(words)
                continue
            count, index, length, _, *slots = map(int, words[1:])
            body, rest = rest[:length], rest[length:]
            for number in range(self.number(count)):
                self.set_index(index, number)
                self.instructions(body)
                for a, b in zip(slots[::2], slots[1::2], strict=True):
                    self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def set_index(self, index: int, number: int) -> None:
        """Computes anew what depends on the index of a loop."""
        changed = {index}
        self.registers[index] = number
        for k, line in enumerate(_section(self.lines, "registers")):
            op, *rest = line.split()[2:]
            if op in _OPS and changed & set(map(int, rest)):
                changed.add(k)
                self.registers[k] = _OPS[op](*(self.number(int(r)) for r in rest))

    def learn(self, late: Mapping[int, int]) -> None:
        """Compute what follows from the sizes of the inputs and from those that calls have made."""
        known = {k for k, value in enumerate(self.registers) if value is not None}
        for k, value in late.items():
            self.registers[k] = value
        for k, line in enumerate(_section(self.lines, "registers")):
            if self.registers[k] is None:
                self.registers[k] = self.register(line.split()[2:])
        for line in _section(self.lines, "guards"):
            number = int(line.split()[1])
            if number not in known and self.registers[number] == 0:
                raise GuardFailed(line)

    def register(self, words: Sequence[str]) -> int | None:
        op, *rest = words
        if op == "dim":
            return self.inputs[int(rest[0])].shape[int(rest[1])]
        if op == "const":
            return int(rest[0])
        if op == "index":
            return 0
        if op == "late":
            return None
        a = self.registers[int(rest[0])]
        if op == "scale":
            return None if a is None else int(a * float(rest[1]))
        b = self.registers[int(rest[1])]
        return None if a is None or b is None else _OPS[op](a, b)

    def number(self, register: int) -> int:
        value = self.registers[register]
        assert value is not None, f"register {register} is used before it is known"
        return value

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
        sizes = [self.registers[int(r)] for r in rest[2 : 2 + rank]]
        if None in sizes:  # made when it is first touched
            return None
        shape = [size for size in sizes if size is not None]
        if "reuse" in rest:
            other = self.slots[int(rest[-1])]
            made = _garbage(shape, dtype)
            if other is None:  # it became known at another time
                return made
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
        if kind in ("arena", "output"):
            self.slots[k] = self.slot(self.kinds[k])
            assert self.slots[k] is not None, f"the size of slot {k} is not known yet"
            return self.tensor(k)
        assert kind == "view", f"slot {k} is read before it is written"
        base, rank = self.tensor(int(rest[0])), int(rest[1])
        numbers = [self.number(int(r)) for r in rest[2:]]
        sizes, strides, offset = numbers[:rank], numbers[rank : 2 * rank], numbers[-1]
        return torch.as_strided(base, sizes, strides, base.storage_offset() + offset)

    def instruction(self, words: Sequence[str]) -> None:
        if words[0] == "when":
            if not self.number(int(words[1])):
                return
            words = words[2:]
        self.ran.append(words[1] if words[0] == "call" else words[1].rpartition("_")[0])
        if words[0] == "call":
            self.call(words[1], words[2:])
            return
        assert words[0] == "launch", words
        name, rest = words[1], [int(w) for w in words[2:]]
        grid = tuple(self.number(r) for r in rest[:3])
        count = rest[3]
        pointers = [self.tensor(k) for k in rest[4 : 4 + count]]
        ints = [self.number(r) for r in rest[5 + count :]]
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
        library, _, short = op.partition("::")
        target = getattr(getattr(getattr(torch.ops, library), short), overload or "default")
        count = int(words[0])
        args = [self.argument(w) for w in words[1 : 1 + count]]
        arguments = target._schema.arguments
        named = {a.name: x for a, x in zip(arguments, args, strict=False) if a.kwarg_only}
        results = target(*args[: len(args) - len(named)], **named)
        slots = words[2 + count :]
        assert len(slots) == int(words[1 + count])
        several = results if isinstance(results, (tuple, list)) else [results]
        self.learn(dict(self.made(slots, several)))
        for slot, result in zip(slots, several, strict=False):
            if slot != "-" and slot[0] != "r":
                self.slots[int(slot)] = self.expected(int(slot), result)

    def made(self, slots: Sequence[str], results: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """(late register, value) for each that these results make known."""
        for slot, result in zip(slots, results, strict=False):
            if slot[0] == "r":
                yield int(slot[1:]), int(result)
            elif slot != "-":
                registers = self.kinds[int(slot)][3 : 3 + result.dim()]
                for register, size in zip(map(int, registers), result.shape, strict=True):
                    if self.registers[register] is None:
                        yield register, size

    def expected(self, k: int, result: torch.Tensor) -> torch.Tensor:
        """``result`` with the strides that slot ``k`` says."""
        _, dtype, rank, *rest = self.kinds[k]
        numbers = [self.number(int(r)) for r in rest]
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
            "r": lambda: self.number(int(text)),
            "i": lambda: int(text),
            "f": lambda: float(text),
            "b": lambda: text == "1",
            "s": lambda: text,
            "d": lambda: torch.device("cpu"),
            "dt": lambda: _DTYPES[text],
            "lt": lambda: [self.tensor(int(p)) for p in parts],
            "lo": lambda: [None if p == "n" else self.tensor(int(p)) for p in parts],
            "li": lambda: [self.number(int(p[1:])) if p[0] == "r" else int(p) for p in parts],
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

# SPDX-License-Identifier: Apache-2.0
"""The program of an engine that a library computes: inputs, guards and outputs (FORMAT.md).

    program = guard_program(cluster)                        # after the export, which may add guards
    program = with_ranges(program, {(0, 1): (1, 512)})      # axis 1 of input 0 has 1 to 512 elements

It has no instructions. The C++ engine checks dtypes, devices, ranks and guards before it calls the library,
and the number, dtypes and sizes of the outputs afterwards.
"""

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.guards import relied_on
from blade.program.dtypes import DTYPES
from blade.program.registers import Registers

VERSION = 1
Range = tuple[int, int | None]
Ranges = Mapping[tuple[int, int], Range]
"""(input, axis) -> its smallest and largest size, both included; ``None``: no largest."""


def guard_program(cluster: Cluster, ranges: Ranges | None = None, *, least: int = 1) -> str:
    """The program text of ``cluster`` with every assumption as a guard.

    ``ranges``: additional limits of the backend. ``least``: the smallest size of a dynamic axis. By default
    empty tensors run the original, because libraries do not test them.

    Raises ``Refused`` for a dtype or a relation that a program cannot express.
    """
    writer = _GuardProgramWriter(cluster)
    for relation, where in relied_on(cluster.gm, cluster.shape_env):
        writer.require(relation, where)
    bounds = dict.fromkeys(writer.dynamic, (least, None)) if least else {}
    return with_ranges(writer.text(), {**bounds, **(ranges or {})})


def with_ranges(program: str, ranges: Ranges) -> str:
    """``program`` with a guard per bound; a range that holds for every size adds no guard."""
    sections = _ProgramSections(program)
    for (index, axis), (low, high) in ranges.items():
        size = f"size {axis} of input {index}"
        if low > 0:
            sections.guard(f"dim {index} {axis}", "ge", low, f"{size} is at least {low}")
        if high is not None:
            sections.guard(f"dim {index} {axis}", "le", high, f"{size} is at most {high}")
    return sections.text()


class _GuardProgramWriter:
    """The parts of a program under construction."""

    def __init__(self, cluster: Cluster) -> None:
        self.shape_env = cluster.shape_env
        self.registers = Registers()
        self.inputs: list[str] = []
        self.guards: dict[int, str] = {}
        self.dynamic: list[tuple[int, int]] = []
        nodes = list(cluster.gm.graph.nodes)
        given = [n.meta["val"] for n in nodes if n.op == "placeholder"]
        for k, fake in enumerate(given):
            self.inputs.append(f"input {k} {_dtype(fake)} {fake.device} {fake.dim()}")
            self._bind(k, fake)
        for k, fake in enumerate(given):
            self._check_sizes(k, fake)
        (returned,) = nodes[-1].args
        self.outputs = [self._output(k, n.meta["val"]) for k, n in enumerate(returned)]

    def require(self, relation: Any, where: str) -> None:
        if relation not in (True, sympy.true):
            self._guard(self.registers.of(relation), f"{relation} {where}")

    def text(self) -> str:
        registers = [f"reg {k} {line}" for k, line in enumerate(self.registers.lines)]
        guards = [f"guard {register} {text.strip()}" for register, text in self.guards.items()]
        lines = [f"blade.disc {VERSION}", "isa"]
        for name, items in (
            ("inputs", self.inputs),
            ("registers", registers),
            ("guards", guards),
            ("slots", self.outputs),
            ("instructions", []),
        ):
            lines += [f"{name} {len(items)}", *items]
        count = len(self.outputs)
        lines += [" ".join(["outputs", str(count), *map(str, range(count))]), "end"]
        return "\n".join(lines) + "\n"

    def _bind(self, index: int, fake: torch.Tensor) -> None:
        for axis, size in enumerate(fake.shape):
            register = self.registers.dim(index, axis)
            symbol = self._size(size)
            if isinstance(symbol, sympy.Symbol) and not self.registers.is_bound(symbol):
                self.registers.bind(symbol, register)
            if isinstance(size, torch.SymInt):
                self.dynamic.append((index, axis))

    def _check_sizes(self, index: int, fake: torch.Tensor) -> None:
        for axis, size in enumerate(fake.shape):
            have, want = self.registers.dim(index, axis), self.registers.of(self._size(size))
            if have != want:
                text = f"size {axis} of input {index} is {self._size(size)}"
                self._guard(self.registers.compare("eq", have, want), text)

    def _output(self, index: int, fake: torch.Tensor) -> str:
        sizes = [str(self.registers.of(self._size(n))) for n in fake.shape]
        return " ".join(["slot", str(index), "output", _dtype(fake), str(len(sizes)), *sizes])

    def _size(self, size: int | torch.SymInt) -> Any:
        if isinstance(size, int):
            return size
        simple = self.shape_env.simplify(size.node.expr)
        return int(simple) if simple.is_Integer else simple

    def _guard(self, register: int, text: str) -> None:
        self.guards.setdefault(register, text)


class _ProgramSections:
    """A program text split into sections, so that registers and guards can be appended."""

    def __init__(self, program: str) -> None:
        self.sections: list[tuple[list[str], list[str]]] = []  # (fields of the headline, items)
        lines = iter(program.splitlines())
        for line in lines:
            words = line.split(" ")
            counted = words[0] in ("inputs", "registers", "guards", "slots", "instructions")
            items = [next(lines) for _ in range(int(words[1]))] if counted else []
            self.sections.append((words, items))

    def guard(self, size: str, op: str, bound: int, text: str) -> None:
        compared = f"{op} {self._register(size)} {self._register(f'const {bound}')}"
        self._items("guards").append(f"guard {self._register(compared)} {text}")

    def text(self) -> str:
        lines = []
        for words, items in self.sections:
            headline = [words[0], str(len(items))] if items else words
            lines += [" ".join(headline), *items]
        return "\n".join(lines) + "\n"

    def _register(self, text: str) -> int:
        items = self._items("registers")
        for number, line in enumerate(items):
            if line.split(" ", 2)[2] == text:
                return number
        items.append(f"reg {len(items)} {text}")
        return len(items) - 1

    def _items(self, name: str) -> list[str]:
        return next(items for words, items in self.sections if words[0] == name)


def _dtype(fake: torch.Tensor) -> str:
    if fake.dtype not in DTYPES:
        raise Refused(Code.UNSUPPORTED_DTYPE, f"{fake.dtype} has no form in a program.")
    return DTYPES[fake.dtype]

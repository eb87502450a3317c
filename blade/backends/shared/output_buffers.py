# SPDX-License-Identifier: Apache-2.0
"""Memory for the outputs of an engine, allocated by torch, with sizes from its program.

    results = OutputBuffers(program, orders)
    buffers, answers = results.allocate(inputs)      # write row-major into buffers; answers are returned

Libraries write into it directly: they are not asked for sizes, and nothing is copied.
"""

import operator
from collections.abc import Callable, Sequence
from math import isqrt

import torch

from blade.program.dtypes import DTYPES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_KEPT = 256  # number of input sizes whose output sizes are remembered

Sizes = tuple[int, ...]


def _floordiv(a: int, b: int) -> int:
    return a // b if b else 0


def _mod(a: int, b: int) -> int:
    return a % b if b else 0


_OPS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _floordiv,
    "mod": _mod,
    "min": min,
    "max": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}


class OutputBuffers:
    """Sizes and dtypes of a program's outputs (FORMAT.md). Thread-safe."""

    def __init__(self, program: str, orders: Sequence[Sequence[int] | None]) -> None:
        lines = [line.split(" ") for line in program.splitlines()]
        self.registers = [words[2:] for words in lines if words[0] == "reg"]
        slots = [words for words in lines if words[0] == "slot"]
        self.dtypes = [_BY_NAME[words[3]] for words in slots]
        self.slots = [[int(register) for register in words[5:]] for words in slots]
        self.orders = orders
        self.known: dict[tuple[torch.Size, ...], tuple[Sizes, ...]] = {}

    def sizes(self, inputs: Sequence[torch.Tensor]) -> tuple[Sizes, ...]:
        """The sizes of each output, in the order of its axes in memory."""
        shapes = tuple(t.shape for t in inputs)
        found = self.known.get(shapes)
        if found is None:
            if len(self.known) >= _KEPT:
                self.known.clear()
            found = self.known[shapes] = self._compute(shapes)
        return found

    def allocate(
        self, inputs: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """New row-major buffers, by default on the CPU, and views of them in the cluster's order of axes."""
        pairs = zip(self.sizes(inputs), self.dtypes, strict=True)
        buffers = [torch.empty(sizes, dtype=dtype, device=device) for sizes, dtype in pairs]
        return buffers, [restore(b, o) for b, o in zip(buffers, self.orders, strict=True)]

    def _compute(self, shapes: Sequence[torch.Size]) -> tuple[Sizes, ...]:
        values: list[int] = []
        for words in self.registers:
            values.append(_evaluate(words, values, shapes))
        logical = [[values[register] for register in slot] for slot in self.slots]
        return tuple(
            tuple(sizes if order is None else (sizes[axis] for axis in order))
            for sizes, order in zip(logical, self.orders, strict=True)
        )


def restore(output: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """A view of ``output``, whose axis k is the cluster's axis ``order[k]``, in the cluster's order."""
    if order is None:
        return output
    return output.permute([list(order).index(axis) for axis in range(len(order))])


def _evaluate(words: Sequence[str], values: Sequence[int], shapes: Sequence[torch.Size]) -> int:
    op, a, *b = words
    if op == "dim":
        return shapes[int(a)][int(b[0])]
    if op == "const":
        return int(a)
    if op == "root":
        return isqrt(max(0, values[int(a)]))
    if op == "scale":
        return int(values[int(a)] * float(b[0]))
    return int(_OPS[op](values[int(a)], values[int(b[0])]))

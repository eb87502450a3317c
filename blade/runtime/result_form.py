# SPDX-License-Identifier: Apache-2.0
"""What a method of a ``torch.classes.blade.Model`` returns; ``csrc/model/result_form.h`` has the text.

form = ResultForm(torch.float32, torch.device("cpu"), (0, 1), ("x0.0", "x0.1 2 //"))
forms_from(form.text)[0].empty([x])        # an empty tensor of that form, also for fake ones
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

UNKNOWN = "?"

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


@dataclass(frozen=True)
class ResultForm:
    """``order``: the axes from the outermost in memory to the innermost. ``sizes``: in postfix notation."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    sizes: tuple[str, ...]

    @property
    def text(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        fields = (f"{name} {self.device}", " ".join(map(str, self.order)), *self.sizes)
        return " | ".join(fields)

    def empty(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """An empty tensor of this form; under a fake mode unknown sizes are new symbols."""
        sizes = [evaluate(size, inputs) for size in self.sizes]
        made = torch.empty(
            [sizes[axis] for axis in self.order], dtype=self.dtype, device=self.device
        )
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return made.permute(inverse)


def evaluate(size: str, inputs: Sequence[torch.Tensor]) -> Any:
    """The number that ``size`` is for ``inputs``: an int, or a symbolic one."""
    if size == UNKNOWN:
        return torch.library.get_ctx().new_dynamic_size()
    stack: list[Any] = []
    for word in size.split():
        if word in OPERATORS:
            right = stack.pop()
            stack.append(OPERATORS[word](stack.pop(), right))
        elif word.startswith("x"):
            place, axis = word[1:].split(".")
            stack.append(inputs[int(place)].shape[int(axis)])
        else:
            stack.append(int(word))
    [number] = stack
    return number


def forms_from(text: str) -> list[ResultForm]:
    """One per line."""
    return [_form(line) for line in text.splitlines()]


def _form(line: str) -> ResultForm:
    kind, order, *sizes = (field.strip() for field in line.split("|"))
    dtype, device = kind.split()
    axes = tuple(map(int, order.split()))
    return ResultForm(getattr(torch, dtype), torch.device(device), axes, tuple(sizes))

# SPDX-License-Identifier: Apache-2.0
"""The table of small models that decide in Python: ``@decides`` adds a row.

    @decides("float of a tensor in an if", lambda d: (d.normal(4, 8),))
    class ...

Lines on which a decision falls end in ``# decides``: an error of the optimized model has to name one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isclass, isfunction
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

Inputs = Any
"""A tuple of positional arguments, or a dict of keyword arguments."""

MARK = "# decides"
CALLS = 50


class Draw:
    """Seeded random inputs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def size(self, low: int, high: int) -> int:
        """An int of ``low`` to ``high``, both included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self._generator))

    def pick(self, *options: Any) -> Any:
        return options[self.size(0, len(options) - 1)]

    def coin(self) -> bool:
        return self.size(0, 1) == 1

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * scale + shift

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 of ``low`` to ``high``, both included."""
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def bits(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        """Bools, of which about ``share`` are true."""
        return torch.rand(*shape, generator=self._generator) < share


@dataclass(frozen=True)
class Row:
    """One model. ``further`` draws the inputs of one call; ``sample`` those that ``optimize`` is given.

    ``kind``: what is decided, and by what. ``is_fixed``: every call decides alike, so that a plain trace is right.
    Modes (``test_decision_table``): ``refused_in`` those in which ``optimize`` raises ``InputError``,
    ``raises_in`` those in which what it returns raises at its own sample, naming the decision.
    """

    name: str
    kind: str
    theme: str
    model: type[nn.Module]
    further: Callable[[Draw], Inputs]
    sample: Callable[[Draw], Inputs]
    is_fixed: bool
    refused_in: Sequence[str]
    raises_in: Sequence[str]

    def make(self) -> nn.Module:
        """The model, with the same weights each time."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(11)
            return self.model().eval()

    def first(self) -> Inputs:
        return self.sample(Draw(1))

    def codes(self) -> Iterator[CodeType]:
        yield from _codes(self.model)

    def lines(self) -> set[int]:
        """The lines of the code of the model's methods."""
        return {
            line
            for code in self.codes()
            for _, _, line in code.co_lines()
            if line is not None and line > code.co_firstlineno
        }

    def marked_lines(self) -> set[int]:
        """The lines on which a decision of the model falls."""
        return {line for line in self.lines() if _source(self.theme)[line - 1].endswith(MARK)}

    def calls(self, count: int = CALLS) -> list[Inputs]:
        return [self.further(Draw(100 + k)) for k in range(count)]


ROWS: dict[str, Row] = {}
Model = TypeVar("Model", bound=type[nn.Module])


def decides(
    kind: str,
    further: Callable[[Draw], Inputs],
    *,
    sample: Callable[[Draw], Inputs] | None = None,
    is_fixed: bool = False,
    refused_in: Sequence[str] = (),
    raises_in: Sequence[str] = (),
) -> Callable[[Model], Model]:
    """Add the class to ``ROWS``; without ``sample`` the sample is drawn as all other inputs are."""

    def add(model: Model) -> Model:
        assert model.__name__ not in ROWS, model
        ROWS[model.__name__] = Row(
            model.__name__,
            kind,
            model.__module__,
            model,
            further,
            sample or further,
            is_fixed,
            refused_in,
            raises_in,
        )
        return model

    return add


def _codes(model: type) -> Iterator[CodeType]:
    """The code of the methods of ``model`` and of classes in it, but not of their constructors."""
    for name, member in vars(model).items():
        member = member.__func__ if isinstance(member, staticmethod) else member
        if isclass(member):
            yield from _codes(member)
        elif isfunction(member) and name != "__init__":
            yield from _nested(member.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@cache
def _source(theme: str) -> tuple[str, ...]:
    path = Path(__file__).parent / f"{theme}.py"
    return tuple(path.read_text(encoding="utf-8").splitlines())

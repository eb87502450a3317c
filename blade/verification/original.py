# SPDX-License-Identifier: Apache-2.0
"""The original of a cluster at a case: its outputs, all at once or as they are computed.

    want = outputs_at(case, original)                    # None if it raises
    want = outputs_at(case, original, each=in_turn)      # an output that is dropped is no longer held
    for number, tensor in want: ...                      # once

In training the outputs are all that forward saves for backward, and an engine's answer takes as much.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, Protocol

import torch

from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.timing.free_cpus import on_free_cpus
from blade.verification import tolerance
from blade.verification.attention_semantics import rows_with_keys
from blade.verification.cases import Case
from blade.verification.copies import copied
from blade.verification.each_guarded import each_guarded

InTurn = Callable[..., Iterator[tuple[int, torch.Tensor]]]
"""Takes the inputs, and yields outputs by number, in any order."""


class Outputs(Protocol):
    """The outputs by number; they are given once unless ``is_repeatable``."""

    is_repeatable: bool

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]: ...


class Held:
    """Outputs that exist; those that were given are no longer held."""

    is_repeatable = False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for i in range(len(self.tensors)):
            tensor, self.tensors[i] = self.tensors[i], _LET_GO
            yield i, tensor
            del tensor


class _Computed:
    """Outputs that are computed when they are asked for, then the inputs of ``updates``, written in copies.

    Those that are drawn are given once: others, who draw meanwhile, would move the generators.
    """

    def __init__(
        self, case: Case, count: int, each: InTurn, updates: Sequence[int], draws: bool
    ) -> None:
        self._case, self._count, self._each, self._updates = case, count, each, updates
        self.is_repeatable = not draws

    def __len__(self) -> int:
        return self._count + len(self._updates)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        given = _written_in_copies(self._case, self._updates)
        yield from each_guarded(self._case, self._each(*given), rows_with_keys)
        for k, i in enumerate(self._updates):
            yield self._count + k, given[i]


def _written_in_copies(case: Case, updates: Sequence[int]) -> list[torch.Tensor]:
    return [copied(t) if i in updates else t for i, t in enumerate(case.inputs)]


def outputs_at(
    case: Case,
    fn: Callable[..., Any],
    updates: Sequence[int] = (),
    written: bool = True,
    each: InTurn | None = None,
    finite: bool = False,
    draws: bool = False,
) -> Outputs | None:
    """Return the outputs, then ``updates``; ``None`` if the original raises, or an output is not ``finite``.

    ``written``, ``updates``: as in ``call``. ``each``: the same function, which then runs twice, here and for the
    outputs, and must write to no input but ``updates``. ``draws``: it draws random numbers.
    """
    if each is None:
        found = call(case, fn, updates, written)
        return None if found is None or (finite and not are_finite(found)) else Held(found)

    def run() -> int | None:
        count = 0
        for _, tensor in each(*_written_in_copies(case, updates)):
            if finite and not are_finite((tensor,)):
                return None
            count += 1
        return count

    with torchscript.unoptimized(), on_free_cpus():
        ran = attempt(Stage.VERIFY, None, case.name, run)
    return _Computed(case, ran, each, updates, draws) if isinstance(ran, int) else None


def call(
    case: Case, fn: Callable[..., Any], updates: Sequence[int] = (), written: bool = True
) -> list[torch.Tensor] | None:
    """Return the outputs of ``fn``, then its ``updates``, the inputs of these numbers; ``None`` if it raises.

    ``written``: it runs on copies of the inputs, which it may write to. They can be all that a model saves for
    backward.
    """
    # the result of some ops depends on the layout of their inputs
    given = tuple(map(copied, case.inputs)) if written else case.inputs
    # the profiling executor would specialize again at the sizes of every case
    with torchscript.unoptimized(), on_free_cpus():
        result = attempt(Stage.VERIFY, None, case.name, lambda: fn(*given))
    if isinstance(result, Reason):
        return None
    answer = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return [*answer, *(given[i] for i in updates)]


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all floats are finite."""
    return all(isfinite(tolerance.largest_of(t)) for t in tensors if t.is_floating_point())


_LET_GO = torch.empty(0)

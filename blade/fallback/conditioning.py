# SPDX-License-Identifier: Apache-2.0
"""An ill-conditioned case or a wrong engine: how far the original itself moves when its numbers do by a rounding.

    moved = moves(answers_of_the_original_at, rounded_at, case, [0, 3])      # of its outputs 0 and 3

Where attention is all but a choice between two keys, or a sum cancels out, the last bit of an input decides
about the answer: the original and the engine round differently inside, and neither is nearer to the truth. An error
of the size of what one rounding of the inputs, or of the sums in between, makes is then no fault (a small backward
error; N. Higham, Accuracy and Stability of Numerical Algorithms, 1.5). Only where contents were made up: the user's
own have to be met.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from blade.fallback import compare
from blade.fallback.cases import Case
from blade.fallback.rounded import nudged

DRAWS = 3

AnswersAt = Callable[[Case], Sequence[torch.Tensor] | None]
"""``None`` where what is asked raises."""


def may_be_ill_conditioned(case: Case) -> bool:
    """Whether ``case`` is none that a user gave, nor one of its sizes alone."""
    return case.kind == "contents"


def moves(
    original: AnswersAt,
    rounded: Callable[[Case, int], Sequence[torch.Tensor] | None],
    case: Case,
    outputs: Sequence[int],
) -> list[float]:
    """How far ``outputs`` of ``original`` move at most, relative to their largest magnitudes (of ints: infinitely).

    ``rounded``: it with its sums a rounding off, as a seed says.
    """
    want = original(case)
    if want is None:
        return [0.0] * len(outputs)
    several = [*map(original, _nudged(case)), *(rounded(case, seed) for seed in range(DRAWS))]
    found = [answer for answer in several if answer is not None]
    return [
        max((compare.errors(one[i], want[i], None).error for one in found), default=0.0)
        for i in outputs
    ]


def _nudged(case: Case) -> Iterator[Case]:
    """``case`` with each float one rounding up or down, ``DRAWS`` times; deterministic."""
    generator = torch.Generator().manual_seed(2)
    for n in range(DRAWS):
        inputs = tuple(nudged(t, generator) for t in case.inputs)
        yield replace(case, name=f"{case.name}, nudged ({n + 1})", inputs=inputs)

# SPDX-License-Identifier: Apache-2.0
"""Tell ill-conditioning from a wrong engine: how far one rounding of the inputs moves the original.

    moved = perturbation_sensitivity(original_at, rounded_at, case, [0, 3], [1e-3, 1e-4])      # outputs 0 and 3

Where attention nearly ties between two keys, or a sum cancels out, the last bit of an input decides the
answer: the original and the engine round differently inside, and neither is nearer to the exact result. An
error no larger than that of one rounding of the inputs, or of intermediate sums, is no fault then (a small
backward error; N. Higham, Accuracy and Stability of Numerical Algorithms, 1.5). This holds for derived
contents: the user's own must match, unless the whole graph amplifies rounding. A deep network in 16 bits that
normalizes after each layer, in training, can be further from fp64 than half its values, and signs that its
gradient reads as masks flip.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from blade.verification.cases import Case
from blade.verification.generators import Generators
from blade.verification.rounding_noise import perturb_by_ulp
from blade.verification.tolerance import errors, share_apart

DRAWS = 8
"""Roundings of each kind that are drawn, at most: fewer where one of them moves the original far enough."""

AnswersAt = Callable[[Case], Sequence[torch.Tensor] | None]
"""``None`` where the function raises."""


def may_be_ill_conditioned(case: Case) -> bool:
    """Whether ``case`` has derived contents: not given by the user, nor a change of sizes alone."""
    return case.kind == "contents"


def perturbation_sensitivity(
    original: AnswersAt,
    rounded: Callable[[Case, int], Sequence[torch.Tensor] | None],
    case: Case,
    outputs: Sequence[int],
    enough: Sequence[float],
) -> list[float]:
    """Return the largest change of ``outputs``, relative to their largest magnitudes.

    Of ints and masks, the share of their elements that change. ``rounded``: the original with its sums off by a
    rounding that a seed determines. ``enough``: the change of each output that nothing more need be drawn for.
    """
    most = [0.0] * len(outputs)
    # in training an answer is all that forward saves: one at a time, and nothing but these outputs of the first
    answer = original(case)
    if answer is None:
        return most
    want = [answer[i] for i in outputs]
    del answer
    for moved in _moved(original, rounded, case):
        if moved is not None:
            changes = [_change(moved[i], w) for i, w in zip(outputs, want, strict=True)]
            most = list(map(max, most, changes))
        del moved
        if all(change >= least for change, least in zip(most, enough, strict=True)):
            break
    return most


def _moved(
    original: AnswersAt, rounded: Callable[[Case, int], Sequence[torch.Tensor] | None], case: Case
) -> Iterator[Sequence[torch.Tensor] | None]:
    generators = Generators(2)
    for seed in range(DRAWS):
        yield original(_nudged(case, seed, generators))
        yield rounded(case, seed)


def _change(got: torch.Tensor, want: torch.Tensor) -> float:
    is_exact = not (want.is_floating_point() or want.is_complex())
    return share_apart(got, want) if is_exact else errors(got, want, None).error


def _nudged(case: Case, number: int, generators: Generators) -> Case:
    """``case`` with each float one rounding up or down."""
    inputs = tuple(perturb_by_ulp(t, generators) for t in case.inputs)
    return replace(case, name=f"{case.name}, nudged ({number + 1})", inputs=inputs)

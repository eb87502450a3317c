# SPDX-License-Identifier: Apache-2.0
"""Tell chance from a wrong engine: an error looks large where the original's own happens to be small.

    for which in changed_inputs(case):         # the small ones, then all
        again = [ratio_at(drawn()) or ratio_at(moved()) for drawn, moved in resampled(case, which)]
        if passes_on_other_inputs(ratio, again): ...     # seen error over the allowed one

The case is drawn again with other contents, of the same sizes and within the same range. A wrong engine is
wrong in every draw, chance is not: the median of the ratios decides. An error many times the allowed one is
not drawn again.

Contents that belong together (an image and the statistics of its channels, which a forward graph saves) mean
nothing when each is drawn alone, and gradients may overflow. Then the sample's own contents are moved a little.

What a model saves for backward may be most of a GPU's memory, and other contents of a small part of it make other
roundings of nearly all that follows. All inputs are drawn again only for what is in doubt after that.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from blade.graph.shapes.memory_format import in_order, stride_order
from blade.verification.cases import Case, random_contents, uniform_like
from blade.verification.generators import Generators

DRAWS = 2
MOVED = 1 / 64
MAX_CHANCE_RATIO = 4.0  # a larger ratio is not chance
_SMALL = 64 << 20  # bytes of inputs that are drawn again together, or
_SHARE = 4  # the inverse of their share of all bytes


def changed_inputs(case: Case) -> list[Collection[int]]:
    """Return numbers of the inputs to change: the smallest, then all. Only all if these hold no floats or are few."""
    sizes = [t.numel() * t.element_size() for t in case.inputs]
    left = max(_SMALL, sum(sizes) // _SHARE)
    small: list[int] = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        left -= sizes[i]
        if left < 0:
            break
        small.append(i)
    every = range(len(sizes))
    if len(small) == len(every) or not any(case.inputs[i].is_floating_point() for i in small):
        return [every]
    return [frozenset(small), every]


def resampled(
    case: Case, which: Collection[int]
) -> Iterator[tuple[Callable[[], Case], Callable[[], Case]]]:
    """Yield what makes ``case`` with contents drawn at random and with its own, moved, ``DRAWS`` times; deterministic.

    ``which``: numbers of the inputs that are changed.

    Inputs can be all that a model saves for backward: hold one of these cases at a time.
    """
    for n in range(DRAWS):
        yield partial(_drawn, case, which, n), partial(_moved, case, which, n)


def _drawn(case: Case, which: Collection[int], n: int) -> Case:
    generators = Generators(2 * n + 1)
    return _changed(case, which, lambda t: random_contents(t, generators), f"drawn again ({n + 1})")


def _moved(case: Case, which: Collection[int], n: int) -> Case:
    generators = Generators(2 * n + 2)
    return _changed(case, which, lambda t: _times_about_one(t, generators), f"moved ({n + 1})")


def _changed(
    case: Case, which: Collection[int], change: Callable[[torch.Tensor], torch.Tensor], how: str
) -> Case:
    inputs = tuple(
        in_order(change(t), stride_order(t)) if i in which else t for i, t in enumerate(case.inputs)
    )
    return replace(case, name=f"{case.name}, {how}", inputs=inputs)


def _times_about_one(tensor: torch.Tensor, generators: Generators) -> torch.Tensor:
    """Floats times 1 to 1 + ``MOVED``."""
    if not tensor.is_floating_point():
        return tensor
    factors = uniform_like(tensor, generators).mul_(MOVED).add_(1)
    return tensor * factors.to(tensor.dtype)


def passes_on_other_inputs(ratio: float, again: Sequence[float | None]) -> bool:
    """Whether an engine whose error is ``ratio`` times the allowed one is right nevertheless.

    ``again``: the ratios at other draws; ``None`` where the engine or the original does not answer.
    """
    ratios = [r for r in again if r is not None]
    return ratio <= MAX_CHANCE_RATIO and len(ratios) == len(again) and median([ratio, *ratios]) <= 1

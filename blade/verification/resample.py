# SPDX-License-Identifier: Apache-2.0
"""Tell chance from a wrong engine: an error looks large where the original's own happens to be small.

    again = [ratio_at(drawn()) or ratio_at(moved()) for drawn, moved in resampled(case)]
    if ratio > 1 and not passes_on_other_inputs(ratio, again): ...     # seen error over the allowed one

The case is drawn again with other contents, of the same sizes and within the same range. A wrong engine is
wrong in every draw, chance is not: the median of the ratios decides. An error many times the allowed one is
not drawn again.

Contents that belong together (an image and the statistics of its channels, which a forward graph saves) mean
nothing when each is drawn alone, and gradients may overflow. Then the sample's own contents are moved a little.
"""

from collections.abc import Callable, Iterator, Sequence
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


def resampled(case: Case) -> Iterator[tuple[Callable[[], Case], Callable[[], Case]]]:
    """Yield what makes ``case`` with contents drawn at random and with its own, moved, ``DRAWS`` times; deterministic.

    Inputs can be all that a model saves for backward: hold one of these cases at a time.
    """
    for n in range(DRAWS):
        yield partial(_drawn, case, n), partial(_moved, case, n)


def _drawn(case: Case, n: int) -> Case:
    generators = Generators(2 * n + 1)
    return _changed(case, lambda t: random_contents(t, generators), f"drawn again ({n + 1})")


def _moved(case: Case, n: int) -> Case:
    generators = Generators(2 * n + 2)
    return _changed(case, lambda t: _times_about_one(t, generators), f"moved ({n + 1})")


def _changed(case: Case, change: Callable[[torch.Tensor], torch.Tensor], how: str) -> Case:
    inputs = tuple(in_order(change(t), stride_order(t)) for t in case.inputs)
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

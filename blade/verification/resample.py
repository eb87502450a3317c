# SPDX-License-Identifier: Apache-2.0
"""Tell chance from a wrong engine: an error looks large where the original's own happens to be small.

    again = [ratio_at(other) for other in resampled(case)]
    if ratio > 1 and not passes_on_other_inputs(ratio, again): ...     # seen error over the allowed one

The case is drawn again with other contents, of the same sizes and within the same range. A wrong engine is
wrong in every draw, chance is not: the median of the ratios decides. An error many times the allowed one is
not drawn again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch

from blade.graph.shapes.memory_format import in_order, stride_order
from blade.verification.cases import Case, random_contents

DRAWS = 2
MAX_CHANCE_RATIO = 4.0  # a larger ratio is not chance


def resampled(case: Case) -> Iterator[Case]:
    """Yield ``case`` with other contents, ``DRAWS`` times; deterministic."""
    generator = torch.Generator().manual_seed(1)
    for n in range(DRAWS):
        inputs = tuple(
            in_order(random_contents(t, generator), stride_order(t)) for t in case.inputs
        )
        yield replace(case, name=f"{case.name}, drawn again ({n + 1})", inputs=inputs)


def passes_on_other_inputs(ratio: float, again: Sequence[float | None]) -> bool:
    """Whether an engine whose error is ``ratio`` times the allowed one is right nevertheless.

    ``again``: the ratios at other draws; ``None`` where the engine or the original does not answer.
    """
    ratios = [r for r in again if r is not None]
    return ratio <= MAX_CHANCE_RATIO and len(ratios) == len(again) and median([ratio, *ratios]) <= 1

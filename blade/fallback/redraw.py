# SPDX-License-Identifier: Apache-2.0
"""Bad luck or a wrong engine: where the original's own error happens to be small, others look large beside it.

    again = [ratio_at(other) for other in redrawn(case)]
    if ratio > 1 and not is_luck(ratio, again): ...     # seen error over the allowed one

The case is drawn again with other contents, of the same sizes and within the same range. A wrong engine is
wrong in every draw; luck is not: the median of the ratios decides. What is many times beyond the bound is
not drawn again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch

from blade.fallback.cases import Case, random_contents
from blade.graph.memory_order import in_order, stride_order

DRAWS = 2
MOST = 4.0  # a larger ratio is no luck


def redrawn(case: Case) -> Iterator[Case]:
    """``case`` with other contents, ``DRAWS`` times; deterministic."""
    generator = torch.Generator().manual_seed(1)
    for n in range(DRAWS):
        inputs = tuple(
            in_order(random_contents(t, generator), stride_order(t)) for t in case.inputs
        )
        yield replace(case, name=f"{case.name}, drawn again ({n + 1})", inputs=inputs)


def is_luck(ratio: float, again: Sequence[float | None]) -> bool:
    """Whether an engine that is ``ratio`` times the allowed error off is right nevertheless.

    ``again``: the same at other draws; ``None`` where the engine or the original does not answer.
    """
    ratios = [r for r in again if r is not None]
    return ratio <= MOST and len(ratios) == len(again) and median([ratio, *ratios]) <= 1

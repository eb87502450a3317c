# SPDX-License-Identifier: Apache-2.0
"""Bad luck or a wrong engine: where the original's own error happens to be small, others look large beside it.

    if ratio > 1 and not is_luck(ratio, case, ratio_at): ...     # seen error over the allowed one

The case is drawn again with other contents, of the same sizes and within the same range. A wrong engine is
wrong in every draw; luck is not: the median of the ratios decides. What is many times beyond the bound is
not drawn again.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from blade.fallback.cases import Case, random_contents
from blade.graph.memory_order import in_order, order_of

DRAWS = 2
MOST = 4.0  # a larger ratio is no luck

RatioAt = Callable[[Case], float | None]
"""Error over allowed error at a case; ``None`` if the engine or the original does not answer there."""


def is_luck(ratio: float, case: Case, ratio_at: RatioAt) -> bool:
    """Whether an engine that is ``ratio`` times the allowed error off at ``case`` is right nevertheless.

    ``ratio_at`` may raise ``Refused``, as at any case.
    """
    if not ratio <= MOST:
        return False
    generator = torch.Generator().manual_seed(1)
    ratios = [ratio]
    for n in range(DRAWS):
        inputs = tuple(in_order(random_contents(t, generator), order_of(t)) for t in case.inputs)
        again = ratio_at(replace(case, name=f"{case.name}, drawn again ({n + 1})", inputs=inputs))
        if again is None:
            return False
        ratios.append(again)
    return median(ratios) <= 1

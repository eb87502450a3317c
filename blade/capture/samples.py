# SPDX-License-Identifier: Apache-2.0
"""Samples that were recorded, with how often each was seen."""

from collections.abc import Iterable
from typing import Any

from blade.config import Config


class Samples(list[Any]):
    """Calls of one module, of each combination of arguments and sizes the first; a tuple of positional arguments,
    or a dict of keyword arguments, as ``blade.optimize`` takes them.

    ``counts``: how often each was seen. ``skipped``: calls that are not kept, for the bound on memory or because
    they have arguments that are neither tensors nor constants nor containers of them.
    """

    def __init__(self, samples: Iterable[Any] = (), counts: Iterable[int] = ()) -> None:
        super().__init__(samples)
        self.counts = list(counts)
        self.skipped = 0


def weighted(inputs: Any, count: int, config: Config) -> Config:
    """``config`` with the counts of recorded ``inputs`` as weights, if they are the ``count`` samples of the captured
    model: paths may have added some, and equal ones are one. Weights that ``config`` has stay."""
    is_free = config.sample_weights is None and config.dynamic_tuning_shapes is None
    if not isinstance(inputs, Samples) or not is_free or not 1 < len(inputs) == count:
        return config
    return config.evolve(sample_weights=tuple(map(float, inputs.counts)))

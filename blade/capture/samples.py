# SPDX-License-Identifier: Apache-2.0
"""Samples that were recorded, with how often each was seen."""

from typing import Any

from blade.config import Config


class Samples(list[Any]):
    """Calls of one module, of each combination of arguments and sizes the first; a tuple of positional arguments,
    or a dict of keyword arguments, as ``blade.optimize`` takes them.

    ``counts``: how often each was seen. ``skipped``: calls that are not kept, for the bound on memory or because
    they have arguments that are neither tensors nor constants nor containers of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.skipped = 0


def weighted(inputs: Any, config: Config) -> Config:
    """``config`` with the counts of recorded ``inputs`` as weights, unless it says otherwise."""
    is_free = config.sample_weights is None and config.dynamic_tuning_shapes is None
    if not isinstance(inputs, Samples) or len(inputs) < 2 or config.quantizes or not is_free:
        return config
    return config.evolve(sample_weights=tuple(map(float, inputs.counts)))

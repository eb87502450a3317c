# SPDX-License-Identifier: Apache-2.0
"""The fp64 run that verification starts with, made while an engine is being compiled by other processes.

early = EarlyTruth(cluster, timed=original)
with meanwhile(early.find):
    engine = backend.convert(cluster, config)
verify(cluster, engine, ..., truth=early.found)         # None: nobody waited, verify makes it
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from blade.backends.base import Cluster
from blade.fallback.attempt import attempt
from blade.fallback.fp64 import Fp64
from blade.fallback.verify import truth_of_first
from blade.reason import Stage

LARGEST = 2 << 30
"""Bytes of weights in fp64 that are kept beside what a compiler needs."""


PROFILED = 3
"""Calls after which TorchScript runs what it has compiled."""


class EarlyTruth:
    """Of one cluster. ``timed``: the original, where it will be timed; TorchScript compiles it meanwhile, too."""

    def __init__(self, cluster: Cluster, timed: Callable[..., Any] | None = None) -> None:
        self._cluster = cluster
        self._timed = timed
        self.found: Fp64 | None = None

    def find(self) -> None:
        """Nothing is found of a cluster of many weights."""
        weights = (*self._cluster.gm.parameters(), *self._cluster.gm.buffers())
        if 8 * sum(weight.numel() for weight in weights) <= LARGEST:
            self.found = truth_of_first(self._cluster)
        if self._timed is not None and self._cluster.samples:
            # what it raises, it raises when it is timed
            attempt(Stage.SELECT, None, self._cluster.name, partial(self._profile, self._timed))

    def _profile(self, timed: Callable[..., Any]) -> None:
        with torch.no_grad():
            for _ in range(PROFILED):
                timed(*self._cluster.samples[0])

# SPDX-License-Identifier: Apache-2.0
"""The fp64 run that verification starts with, made while an engine is being compiled by other processes.

early = EarlyTruth(cluster)
with meanwhile(early.find):
    engine = backend.convert(cluster, config)
verify(cluster, engine, ..., truth=early.found)         # None: nobody waited, verify makes it
"""

from blade.backends.base import Cluster
from blade.fallback.fp64 import Fp64
from blade.fallback.verify import truth_of_first

LARGEST = 2 << 30
"""Bytes of weights in fp64 that are kept beside what a compiler needs."""


class EarlyTruth:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.found: Fp64 | None = None

    def find(self) -> None:
        """Nothing is found of a cluster of many weights."""
        weights = (*self._cluster.gm.parameters(), *self._cluster.gm.buffers())
        if 8 * sum(weight.numel() for weight in weights) <= LARGEST:
            self.found = truth_of_first(self._cluster)

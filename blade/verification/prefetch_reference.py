# SPDX-License-Identifier: Apache-2.0
"""Compute the first fp64 reference of verification while other processes compile the engine.

early = PrefetchedReference(cluster, timed=original)
with meanwhile(early.find):
    engine = backend.convert(cluster, config)
verify(cluster, engine, ..., truth=early.found)         # None: not finished, verify computes it
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from blade.core.attempt import attempt
from blade.core.cluster import Cluster
from blade.core.pytree import tensors_in
from blade.core.reason import Stage
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.verify import reference_of_first

LARGEST = 2 << 30
"""Most bytes of fp64 weights to keep while a compiler runs."""


PROFILED = 3
"""Calls after which TorchScript runs its compiled code."""


class PrefetchedReference:
    """The reference of one cluster. ``timed``: the original, for TorchScript to compile before timing."""

    def __init__(self, cluster: Cluster, timed: Callable[..., Any] | None = None) -> None:
        self._cluster = cluster
        self._timed = timed
        self.found: Fp64Reference | None = None

    def find(self) -> None:
        """Compute the reference, unless the cluster has too many weights."""
        weights = (*self._cluster.gm.parameters(), *self._cluster.gm.buffers())
        if 8 * sum(weight.numel() for weight in weights) <= LARGEST:
            self.found = reference_of_first(self._cluster)
        if self._timed is not None and self._cluster.samples:
            # an exception here recurs when the original is timed
            attempt(Stage.SELECT, None, self._cluster.name, partial(self._profile, self._timed))

    def _profile(self, timed: Callable[..., Any]) -> None:
        if any(t.is_cuda for t in tensors_in(list(self._cluster.samples[0]))):
            return  # where it runs op by op
        with torch.no_grad():
            for _ in range(PROFILED):
                timed(*self._cluster.samples[0])

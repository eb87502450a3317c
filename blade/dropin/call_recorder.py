# SPDX-License-Identifier: Apache-2.0
"""Keep copies of the tensors of calls, by kind and sizes, with a bound on their memory."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from blade.capture.reference_model import copy_of
from blade.dropin.call_kind import Call, CallKind

SIZES = 4  # samples of different sizes that are kept of a kind
LIMIT = 256 * 2**20  # bytes of all samples

Sizes = tuple[tuple[int, ...], ...]


@dataclass
class Recorded:
    """The calls of one kind: a sample of each of their sizes, and how often it came."""

    samples: dict[Sizes, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    counts: dict[Sizes, int] = field(default_factory=dict)
    calls: int = 0  # those of other sizes, too

    def frequent(self) -> tuple[list[tuple[torch.Tensor, ...]], list[int]]:
        """The samples and their counts, the commonest first."""
        order = sorted(self.samples, key=lambda sizes: -self.counts[sizes])
        return [self.samples[one] for one in order], [self.counts[one] for one in order]


class CallRecorder:
    """Records calls from any thread."""

    def __init__(self, sizes: int = SIZES, limit: int = LIMIT) -> None:
        self.kinds: dict[CallKind, Recorded] = {}
        self._sizes, self._limit, self._bytes = sizes, limit, 0
        self._lock = threading.Lock()

    def add(self, call: Call, count: int = 1) -> Recorded:
        """Count ``call``, which was seen ``count`` times; copy its tensors if they are the first of their sizes, and
        there is room."""
        sizes = tuple(tuple(t.shape) for t in call.tensors)
        with self._lock:
            recorded = self.kinds.setdefault(call.kind, Recorded())
            recorded.calls += count
            if sizes in recorded.samples:
                recorded.counts[sizes] += count
            elif len(recorded.samples) < self._sizes and self._fits(call.tensors):
                recorded.samples[sizes] = tuple(copy_of(call.tensors))
                recorded.counts[sizes] = count
            return recorded

    def forget(self, kind: CallKind) -> None:
        """Drop the samples of ``kind``."""
        with self._lock:
            recorded = self.kinds.pop(kind, None)
            if recorded is not None:
                self._bytes -= sum(_bytes(one) for one in recorded.samples.values())

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        more = _bytes(tensors)
        if self._bytes + more > self._limit:
            return False
        self._bytes += more
        return True


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

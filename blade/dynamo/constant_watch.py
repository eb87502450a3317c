# SPDX-License-Identifier: Apache-2.0
"""Detect writes to bound parameters that bump no version counter, such as those through ``.data``.

watch = ConstantWatch(constants)
watch.check()             # before each call: bumps the versions of constants that were written

Engines of libraries hold folded or packed weights and make them anew once a version has changed. DISC's
engines sample some elements themselves; this class does so for the others. It samples constants on the CPU
only: reading from another device would wait for it.
"""

import threading
from collections.abc import Iterable

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

PLACES = 16  # sampled elements per constant, evenly spaced
Sample = tuple[torch.Tensor, torch.Tensor]  # a constant, and a view of some of its elements


class ConstantWatch:
    """Remembers some elements of each of ``constants``, and so notices a write to a whole tensor."""

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        self._lock = threading.Lock()
        self._by_dtype: dict[torch.dtype, list[Sample]] = {}
        for one in constants:
            if (some := _sample(one)) is not None:
                self._by_dtype.setdefault(one.dtype, []).append((one, some))
        self._seen = self._read()

    def check(self) -> None:
        """Bump the versions of all constants of a dtype if one of them differs."""
        now = self._read()
        if all(torch.equal(now[dtype], seen) for dtype, seen in self._seen.items()):
            return
        with self._lock:
            for dtype, seen in self._seen.items():
                if not torch.equal(now[dtype], seen):
                    torch.autograd.graph.increment_version(
                        [one for one, _ in self._by_dtype[dtype]]
                    )
            self._seen = now

    def _read(self) -> dict[torch.dtype, torch.Tensor]:
        """The sampled elements as bytes, so that a NaN equals itself."""
        return {
            dtype: torch.cat([some for _, some in samples]).view(torch.uint8)
            for dtype, samples in self._by_dtype.items()
        }


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of some elements of ``tensor``; ``None`` if they cannot be read, or cannot be written."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    if not is_non_overlapping_and_dense_or_false(tensor):
        return tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.view(1)
    places = min(tensor.numel(), PLACES)
    return tensor.as_strided((places,), (tensor.numel() // places,), tensor.storage_offset())

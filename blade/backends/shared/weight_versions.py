# SPDX-License-Identifier: Apache-2.0
"""Detect in-place writes to weights that a library has folded or packed.

written = WeightVersions(constants)
... written.since()         # True once one of them was written in place
"""

from collections.abc import Sequence

import torch


class WeightVersions:
    """Remembers torch's version counters; tensors made in inference mode have none and cannot be written."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [t for t in tensors if not t.is_inference()]
        self.seen = self._versions()

    def since(self) -> bool:
        """Whether a weight was written since this object was made."""
        return self._versions() != self.seen

    def _versions(self) -> int:
        return sum([t._version for t in self.tensors])

# SPDX-License-Identifier: Apache-2.0
"""Weights that are written in place after a library has folded or packed them.

written = Watch(constants)
... written.since()         # True once one of them was written in place
"""

from collections.abc import Sequence

import torch


class Watch:
    """Notes torch's version counters; a tensor made in inference mode has none and cannot be written."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [t for t in tensors if not t.is_inference()]
        self.seen = self._versions()

    def since(self) -> bool:
        """Whether one was written since this was made."""
        return self._versions() != self.seen

    def _versions(self) -> int:
        return sum([t._version for t in self.tensors])

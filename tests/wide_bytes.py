# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of float64 tensors that ops make and that are alive.

with WideBytes() as seen:
    run()
seen.peak
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from blade.verification.wide_at_use import WideAtUse


class WideBytes(TorchDispatchMode):
    """``peak``: the most bytes alive at a time; memory within one op is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, WideAtUse):
                self._see(leaf)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.dtype is not torch.float64 or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

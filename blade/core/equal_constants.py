# SPDX-License-Identifier: Apache-2.0
"""Shares constants of equal contents among engines, which each made their own.

    constants = [shared(c) for c in constants]      # of equal tensors, the one that is in use already

Engines of several paths quantize the same weights. What they share is kept once in memory, packed once, and
saved once.
"""

import hashlib
import threading
import weakref
from typing import Any, cast

import torch

_FEWEST_BYTES = 4096

_known: "weakref.WeakValueDictionary[tuple[object, ...], torch.Tensor]" = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def shared(constant: torch.Tensor) -> torch.Tensor:
    """An equal tensor that was given here before and is still in use, else ``constant``.

    ``constant`` must be nobody's but the engine's: whoever writes to it writes to other engines' constants.
    """
    if constant.nbytes < _FEWEST_BYTES or not constant.is_contiguous():
        return constant
    contents = constant.detach().cpu().view(-1).view(torch.uint8).numpy()
    key = (
        constant.dtype,
        tuple(constant.shape),
        constant.device,
        hashlib.sha256(cast(Any, contents)).digest(),
    )
    with _lock:
        return _known.setdefault(key, constant)

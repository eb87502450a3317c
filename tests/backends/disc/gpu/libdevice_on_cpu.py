# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's libdevice for Triton's interpreter, which has none: the same functions by torch, in float64 inside."""

from collections.abc import Callable
from typing import Any

import torch

_NAMES = {"pow": "pow", "rint": "round", "fmod": "fmod", "isnan": "isnan", "isinf": "isinf"}


class Libdevice:
    """``libdevice.erf(x)`` of an interpreted function."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., torch.Tensor] = getattr(torch, _NAMES.get(name, name))
        return lambda *args: _apply(function, *args)


def _apply(function: Callable[..., torch.Tensor], *args: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    like = next(a for a in args if isinstance(a, tl.tensor))
    numbers = [torch.as_tensor(a.handle.data if isinstance(a, tl.tensor) else a) for a in args]
    made = function(*(n.double() for n in numbers)).numpy().astype(like.handle.data.dtype)
    return tl.tensor(TensorHandle(made, like.handle.dtype), like.type)

# SPDX-License-Identifier: Apache-2.0
"""The reference semantics of the pointwise ops, as torch expressions."""

import operator
from collections.abc import Callable

import torch

_NAMED = (
    "neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh asin "
    "acos atan erf erfc sigmoid floor ceil round trunc logical_not bitwise_not isnan isinf add sub mul "
    "div remainder fmod pow maximum minimum atan2 copysign eq ne lt le gt ge logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor where"
).split()
POINTWISE_REFERENCE: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name) for name in _NAMED
}
POINTWISE_REFERENCE |= {
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fma": lambda a, b, c: a * b + c,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's conversion of elements."""
    return x.to(dtype)

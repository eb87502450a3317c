# SPDX-License-Identifier: Apache-2.0
"""Decomposes ops over lists of tensors, as optimizers use them, into ops on each tensor.

    _foreach_addcmul([a, b], [c, d], [e, f], 0.1)   ->   [addcmul(a, c, e, value=0.1), addcmul(b, d, f, value=0.1)]

All ops on one parameter then fuse into one kernel, and parameters of equal form share it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Each = Callable[..., Any]

_UNARY = (
    "abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
_BINARY = "add clamp_max clamp_min div mul pow sub".split()


def _norm(x: torch.Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    length: torch.Tensor = torch.linalg.vector_norm(x, order, dtype=dtype)
    return length


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return torch.addcmul(x, a, b, value=value)


def _addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return torch.addcdiv(x, a, b, value=value)


_EACH: dict[str, Each] = {
    **{f"{name}.default": getattr(torch, name) for name in _UNARY},
    **{
        f"{name}.{kind}": getattr(torch, name)
        for name in _BINARY
        for kind in ("List", "Scalar", "ScalarList", "Tensor", "ScalarAndTensor")
    },
    "maximum.List": torch.maximum,
    "minimum.List": torch.minimum,
    **{f"maximum.{kind}": torch.clamp_min for kind in ("Scalar", "ScalarList")},
    **{f"minimum.{kind}": torch.clamp_max for kind in ("Scalar", "ScalarList")},
    **{f"addcmul.{kind}": _addcmul for kind in ("Scalar", "ScalarList")},
    **{f"addcdiv.{kind}": _addcdiv for kind in ("Scalar", "ScalarList")},
    **{f"lerp.{kind}": torch.lerp for kind in ("List", "Scalar", "ScalarList")},
    "norm.Scalar": _norm,
    "max.default": torch.max,
    "mm.default": torch.mm,
    "copy.default": aten.copy.default,
    "zero.default": torch.zeros_like,
}
"""Name and overload of the op over lists -> the op on one tensor."""


def _over_lists(op: torch._ops.OpOverload, each: Each) -> Each:
    """``op`` by ``each``: list arguments are iterated together, other arguments are the same for all."""
    is_list = [str(a.type).startswith("List[") for a in op._schema.arguments if not a.kwarg_only]

    def decomposed(*args: Any, **kwargs: Any) -> list[Any]:
        count = next(len(a) for a, listed in zip(args, is_list, strict=False) if listed)
        return [each(*one, **kwargs) for one in _rows(args, is_list, count)]

    return decomposed


def _rows(args: Sequence[Any], is_list: Sequence[bool], count: int) -> Iterator[list[Any]]:
    for i in range(count):
        yield [a[i] if listed else a for a, listed in zip(args, is_list, strict=False)]


def _find() -> Iterator[tuple[torch._ops.OpOverload, Each]]:
    for name, each in _EACH.items():
        base, overload = name.split(".")
        packet = getattr(aten, f"_foreach_{base}", None)  # missing in older versions of torch
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            yield op, _over_lists(op, each)


FOREACH = dict(_find())
"""ATen overload over lists -> its decomposition."""

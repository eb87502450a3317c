# SPDX-License-Identifier: Apache-2.0
"""Reductions along a tile's rows: the identity, combining two tiles, and reducing a tile's columns."""

import torch

from blade.backends.disc.gpu.emit.pointwise import register_type
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Compute,
    Kernel,
    Reduce,
    Store,
)

_JOIN = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "max_nan({0}, {1})",
    "min": "min_nan({0}, {1})",
}
_INT_JOIN = {"max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}
_ACROSS = {
    "sum": "tl.sum({0}, {1}{2})",
    "prod": "tl.reduce({0}, {1}, product{2})",
    "max": "tl.reduce({0}, {1}, max_nan{2})",
    "min": "tl.reduce({0}, {1}, min_nan{2})",
}
_INT_ACROSS = {"max": "tl.max({0}, {1}{2})", "min": "tl.min({0}, {1}{2})"}


def working_type(reduce: Reduce) -> str:
    """The type of accumulators: 0 and 1 of 32 bits for bool."""
    return "tl.int32" if reduce.dtype == torch.bool else register_type(reduce.dtype)


def identity(reduce: Reduce) -> str:
    """The result of an empty row."""
    kind, dtype = _kind(reduce), reduce.dtype
    if kind in ("sum", "prod"):
        value = "0" if kind == "sum" else "1"
    elif dtype == torch.bool:
        value = "0" if kind == "max" else "1"
    elif dtype.is_floating_point:
        value = f'float("{"-" if kind == "max" else ""}inf")'
    else:
        info = torch.iinfo(dtype)
        value = str(info.min if kind == "max" else info.max)
    return f"tl.full([], {value}, {working_type(reduce)})"


def prepare(reduce: Reduce, x: str, dtype: torch.dtype) -> str:
    """Convert a value of ``dtype`` to the form of the accumulators."""
    if reduce.dtype != torch.bool:
        return x
    return f"{x}.to(tl.int32)" if dtype == torch.bool else f"({x} != 0).to(tl.int32)"


def join(reduce: Reduce, total: str, x: str) -> str:
    """Combine two accumulators, element by element."""
    return _table(reduce, _JOIN, _INT_JOIN).format(total, x)


def across(reduce: Reduce, x: str, rows: int) -> str:
    """Reduce the columns of ``x``, a tile of ``rows`` rows, in the result's type."""
    axis, keep = ("0", "") if rows == 1 else ("1", ", keep_dims=True")
    text = _table(reduce, _ACROSS, _INT_ACROSS).format(x, axis, keep)
    if reduce.dtype == torch.bool:
        return f"{text} != 0"
    # Triton sums small integers in 32 bits
    return text if reduce.dtype.is_floating_point else f"{text}.to({working_type(reduce)})"


def vanishing(kernel: Kernel, reduce: Reduce) -> int | None:
    """The x of ``reduce`` = sum(exp(x - max(x))), where x = -inf changes neither the sum nor max(x).

    ``None`` for a kernel that stores row values, which would be NaN for a row without elements.
    """
    body = kernel.body
    power = body[reduce.arg]
    stores = [s for s in body if isinstance(s, Store)]
    if reduce.kind != "sum" or any(number(s.access.strides[-1]) == 0 for s in stores):
        return None
    if not isinstance(power, Compute) or power.op not in ("exp", "exp2"):
        return None
    difference = body[power.args[0]]
    if not isinstance(difference, Compute) or difference.op != "sub":
        return None
    x, most = difference.args
    return x if isinstance(m := body[most], Reduce) and (m.kind, m.arg) == ("max", x) else None


def _table(reduce: Reduce, floats: dict[str, str], ints: dict[str, str]) -> str:
    kind = _kind(reduce)
    return floats[kind] if reduce.dtype.is_floating_point else {**floats, **ints}[kind]


def _kind(reduce: Reduce) -> str:
    return {"any": "max", "all": "min"}.get(reduce.kind, reduce.kind)

# SPDX-License-Identifier: Apache-2.0
"""Reductions over the inner dimension: accumulators in lanes, joined as a tree at the end of the row."""

import torch

from blade.backends.disc.cpu import memory, pointwise
from blade.backends.disc.cpu.code import Code, Value
from blade.backends.disc.kernel import Reduce, Stmt

_OP = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "min": "minimum",
    "any": "bitwise_or",
    "all": "bitwise_and",
}
# i1 is a poor loop-carried vector: bool reductions accumulate 0/1 in this type.
_WIDE_BOOL = torch.int32


def identity(code: Code, reduce: Reduce, lanes: int) -> Value:
    """What an empty row gives."""
    dtype = _working(reduce)
    low, high = _range(dtype)
    value = {"sum": 0, "prod": 1, "max": low, "min": high, "any": 0, "all": 1}[_kind(reduce)]
    return code.constant(value, memory.REGISTER[dtype], lanes)


def prepare(code: Code, reduce: Reduce, x: Value) -> Value:
    """A value as the accumulators hold it."""
    return code.convert("arith.extui", x, "i32") if x.element == "i1" else x


def combine(code: Code, reduce: Reduce, total: Value, x: Value) -> Value:
    dtype = _working(reduce)
    return pointwise.compute(code, _OP[_kind(reduce)], [total, x], dtype, dtype)


def across(code: Code, reduce: Reduce, x: Value) -> Value:
    """All lanes joined into a scalar."""
    while x.lanes > 1:
        x = combine(code, reduce, code.half(x, high=False), code.half(x, high=True))
    return x


def finish(code: Code, reduce: Stmt, total: Value) -> Value:
    """From the accumulator's type to the result's."""
    assert isinstance(reduce, Reduce), reduce
    return code.compare("ne", total, code.like(0, total)) if reduce.dtype == torch.bool else total


def _kind(reduce: Reduce) -> str:
    if reduce.dtype == torch.bool:
        return {"max": "any", "min": "all"}.get(reduce.kind, reduce.kind)
    return reduce.kind


def _working(reduce: Reduce) -> torch.dtype:
    return _WIDE_BOOL if reduce.dtype == torch.bool else reduce.dtype


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return float("-inf"), float("inf")
    info = torch.iinfo(dtype)
    return info.min, info.max

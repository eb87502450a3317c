# SPDX-License-Identifier: Apache-2.0
"""Reductions over the inner dimension: accumulators in lanes, combined as a tree at the end of the row."""

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.ir.kernel import Reduce, Stmt

_OP = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "min": "minimum",
    "any": "bitwise_or",
    "all": "bitwise_and",
}
# Loop-carried vectors of i1 are slow: bool reductions accumulate 0/1 in this type.
_WIDE_BOOL = torch.int32


def identity(code: MlirBuilder, reduce: Reduce, lanes: int) -> SsaValue:
    """The result of an empty row."""
    dtype = _working(reduce)
    low, high = _range(dtype)
    value = {"sum": 0, "prod": 1, "max": low, "min": high, "any": 0, "all": 1}[_kind(reduce)]
    return code.constant(value, memory.REGISTER[dtype], lanes)


def prepare(code: MlirBuilder, reduce: Reduce, x: SsaValue) -> SsaValue:
    """Convert a value to the form of the accumulators."""
    return code.convert("arith.extui", x, "i32") if x.element == "i1" else x


def combine(code: MlirBuilder, reduce: Reduce, total: SsaValue, x: SsaValue) -> SsaValue:
    dtype = _working(reduce)
    return pointwise.compute(code, _OP[_kind(reduce)], [total, x], dtype, dtype)


def across(code: MlirBuilder, reduce: Reduce, x: SsaValue) -> SsaValue:
    """Reduce all lanes to a scalar."""
    while x.lanes > 1:
        x = combine(code, reduce, code.half(x, high=False), code.half(x, high=True))
    return x


def finish(code: MlirBuilder, reduce: Stmt, total: SsaValue) -> SsaValue:
    """Convert from the accumulator's type to the result's."""
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

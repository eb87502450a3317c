# SPDX-License-Identifier: Apache-2.0
"""Nodes that TVM supports: a table of ops whose conversion was verified, in fp32.

TVM's converter has rules for many more ops, but for one combination of dtypes each: it adds ints to floats,
divides ints to ints and computes products in fp32 for any inputs. So ops with mixed dtypes are not supported.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from blade.core.cluster import OpNode, ValueInfo, values_in
from blade.core.reason import Code, Reason, Stage

NAME = "tvm"
aten = torch.ops.aten
_FLOATS = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default),
        *(aten.exp.default, aten.sqrt.default, aten.rsqrt.default),
        *(aten.neg.default, aten.abs.default, aten.erf.default),
        *(aten.linear.default, aten.matmul.default, aten.bmm.default, aten.mm.default),
        *(aten.softmax.int, aten.layer_norm.default, aten.mean.dim, aten.sum.dim_IntList),
    }
)
"""Supported if all tensors are fp32. tanh is missing, because it returns 0 for tiny arguments."""
_LAYOUTS = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int),
        *(aten.unsqueeze.default, aten.contiguous.default, aten.clone.default),
        *(aten.eq.Scalar, aten.ne.Scalar, aten.masked_fill.Scalar),
    }
)
"""Supported for ints and bools too: they move elements, compare or select."""
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


def why_not_op(node: OpNode) -> Reason | None:
    """``None`` if TVM supports ``node``."""
    if node.target not in _FLOATS | _LAYOUTS:
        return _reason(Code.UNSUPPORTED_OP, node, "it is not among the ops tried with it")
    allowed = _DTYPES if node.target in _LAYOUTS else (torch.float32,)
    given = values_in([*node.args, *node.kwargs.values(), *node.outputs])
    for value in (v for v in given if v.kind == "tensor"):
        if value.dtype not in allowed:
            why = f"it is given no tensors of {value.dtype} there"
            return _reason(Code.UNSUPPORTED_DTYPE, node, why)
        if value.device is None or value.device.type != "cpu":
            why = f"it compiles for the CPU, not for {value.device}"
            return _reason(Code.UNSUPPORTED_DEVICE, node, why)
    check = _ARGUMENTS.get(node.target)
    if check is not None and (why_not := check(node)) is not None:
        return _reason(Code.UNSUPPORTED_OP, node, why_not)
    return None


def _normalized(node: OpNode) -> str | None:
    _, shape, weight, bias, *_ = node.args
    if any(isinstance(size, ValueInfo) for size in shape):
        return "its converter wants numbers as the sizes that are normalized over"
    if weight is None or bias is None:
        return "its converter wants a weight and a bias"
    return None


def _reduced(node: OpNode) -> str | None:
    return None if node.args[1] else "its converter takes no axes for none, and torch for all"


def _compared(node: OpNode) -> str | None:
    dtype = node.args[0].dtype
    if dtype is torch.bool:
        return "its code generator fails at comparisons of bools"
    if dtype is torch.float32 and node.target is aten.ne.Scalar:
        return "NaN differs from nothing there"
    return None


def _filled(node: OpNode) -> str | None:
    x, _, value = node.args
    if x.dtype is torch.float32 and isinstance(value, float) and isfinite(value):
        return None
    return "its converter fills floats with finite floats alone"


_ARGUMENTS: dict[Any, Callable[[OpNode], str | None]] = {
    aten.masked_fill.Scalar: _filled,
    aten.eq.Scalar: _compared,
    aten.ne.Scalar: _compared,
    aten.layer_norm.default: _normalized,
    aten.mean.dim: _reduced,
    aten.sum.dim_IntList: _reduced,
}
"""Supported with some arguments only; ``node.args`` has one entry per positional argument."""


def _reason(code: Code, node: OpNode, why: str) -> Reason:
    detail = f"{node.target} does not go to TVM: {why}."
    return Reason(Stage.SUPPORT, code, NAME, node.name, detail)

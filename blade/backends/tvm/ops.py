# SPDX-License-Identifier: Apache-2.0
"""Which nodes TVM takes: a table of ops whose conversion was seen to be right, in fp32.

Its converter has rules for many more ops. It has them for one form of each: it adds ints to floats, divides
ints to ints and computes products in fp32 whatever it is given, so what is not uniformly float stays out.
"""

from typing import Any

import torch

from blade.backends.base import OpNode, ValueInfo
from blade.reason import Code, Reason, Stage

NAME = "tvm"
aten = torch.ops.aten
_FLOATS = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default),
        *(aten.tanh.default, aten.exp.default, aten.sqrt.default, aten.rsqrt.default),
        *(aten.neg.default, aten.abs.default, aten.erf.default),
        *(aten.linear.default, aten.matmul.default, aten.bmm.default, aten.mm.default),
        *(aten.softmax.int, aten.layer_norm.default, aten.mean.dim, aten.sum.dim_IntList),
    }
)
"""Taken if all tensors are fp32."""
_LAYOUTS = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int),
        *(aten.unsqueeze.default, aten.contiguous.default, aten.clone.default),
        *(aten.eq.Scalar, aten.ne.Scalar, aten.masked_fill.Scalar),
    }
)
"""Taken for ints and bools too: they move elements, compare or select."""
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


def why_not_op(node: OpNode) -> Reason | None:
    """``None`` if TVM takes ``node``."""
    if node.target not in _FLOATS | _LAYOUTS:
        return _reason(Code.UNSUPPORTED_OP, node, "it is not among the ops tried with it")
    allowed = _DTYPES if node.target in _LAYOUTS else (torch.float32,)
    for value in _tensors([*node.args, *node.kwargs.values(), *node.outputs]):
        if value.dtype not in allowed:
            why = f"it is given no tensors of {value.dtype} there"
            return _reason(Code.UNSUPPORTED_DTYPE, node, why)
        if value.device is None or value.device.type != "cpu":
            why = f"it compiles for the CPU, not for {value.device}"
            return _reason(Code.UNSUPPORTED_DEVICE, node, why)
    return None


def _tensors(values: list[Any]) -> list[ValueInfo]:
    flat = [one for v in values for one in (v if isinstance(v, (list, tuple)) else [v])]
    return [one for one in flat if isinstance(one, ValueInfo) and one.kind == "tensor"]


def _reason(code: Code, node: OpNode, why: str) -> Reason:
    detail = f"{node.target} does not go to TVM: {why}."
    return Reason(Stage.SUPPORT, code, NAME, node.name, detail)

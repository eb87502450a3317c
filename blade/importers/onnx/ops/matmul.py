# SPDX-License-Identifier: Apache-2.0
"""Matrix products."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import MICROSOFT, NodeView, row
from blade.importers.onnx.emit.values import Sizes, TensorValue, Value
from blade.importers.onnx.ops.pointwise import broadcast, wide


@row("MatMul")
def matmul(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    text = f"torch.matmul({wide(e, node, a)}, {wide(e, node, b)})"
    dtype = e.dtype(a)
    if dtype in (torch.uint32, torch.uint64):
        text += f".to({dtype})"
    return TensorValue(text, dtype, product_dims(e, a, b))


def product_dims(e: Emitter, a: Value, b: Value) -> Sizes | None:
    """The sizes of a matrix product."""
    left, right = e.sizes(a), e.sizes(b)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    batch = broadcast(e, TensorValue("", None, left[:-2]), TensorValue("", None, right[:-2]))
    return (*(batch or ()), left[-2], right[-1])


@row("Gemm")
def gemm(e: Emitter, node: NodeView, a: Value, b: Value, c: Value | None = None) -> TensorValue:
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    left, right, dtype = e.tensor(a), e.tensor(b), e.dtype(a)
    flip_left, flip_right = node.int("transA", 0), node.int("transB", 0)
    rows, columns = e.dims(a), e.dims(b)
    dims = None
    if rows is not None and columns is not None:
        dims = (rows[1 if flip_left else 0], columns[0 if flip_right else 1])
    if flip_left:
        left = f"{left}.t()"
    bias_dims = None if c is None else e.dims(c)
    is_linear = alpha == 1 and beta == 1 and flip_right and dtype.is_floating_point
    fits = bias_dims is not None and columns is not None and bias_dims == (columns[0],)
    if is_linear and (c is None or fits):
        bias = "" if c is None else f", {e.tensor(c)}"
        return TensorValue(f"torch.ops.aten.linear({left}, {right}{bias})", dtype, dims)
    if flip_right:
        right = f"{right}.t()"
    made = f"torch.matmul({left}, {right})"
    scale = number_text(alpha if dtype.is_floating_point else int(alpha))
    if alpha != 1:
        made = f"{made} * {scale}"
    if c is not None and beta != 0:
        scale = number_text(beta if dtype.is_floating_point else int(beta))
        made += f" + {e.tensor(c)}" if beta == 1 else f" + {e.tensor(c)} * {scale}"
    return TensorValue(made, dtype, dims)


@row("FusedMatMul", domain=MICROSOFT)
def fused_matmul(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    if node.int("transBatchA", 0) or node.int("transBatchB", 0):
        raise NotImported("A batch is transposed.")
    left, right = e.tensor(a), e.tensor(b)
    if node.int("transA", 0):
        left = f"{left}.transpose(-1, -2)"
    if node.int("transB", 0):
        right = f"{right}.transpose(-1, -2)"
    made, alpha = f"torch.matmul({left}, {right})", node.float("alpha", 1.0)
    rank = max(e.rank(a), e.rank(b))
    text = made if alpha == 1 else f"{made} * {number_text(alpha)}"
    return TensorValue(text, e.dtype(a), (None,) * rank)


@row("Einsum")
def einsum(e: Emitter, node: NodeView, *values: Value) -> TensorValue:
    given = ", ".join(e.tensor(one) for one in values)
    equation = node.text("equation", "").replace(" ", "")
    return TensorValue(f'torch.einsum("{equation}", [{given}])', e.dtype(values[0]))

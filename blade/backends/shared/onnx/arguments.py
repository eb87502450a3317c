# SPDX-License-Identifier: Apache-2.0
"""Arguments that ONNX cannot express, of ops that it can: a function per op, from a node to a sentence.

    check = ARGUMENTS.get("pow.Tensor_Scalar")
    check(node)                     # None, or why this call is not supported

``node.args`` has one entry per positional argument of the op's schema.
"""

from collections.abc import Callable

import torch

from blade.core.cluster import OpNode, ValueInfo, values_in

Check = Callable[[OpNode], str | None]


def _power(node: OpNode) -> str | None:
    exponent = node.args[1]
    if isinstance(exponent, (int, float)) and exponent in range(1, 9):
        return None
    return "powers but the first few whole ones treat infinities in another way"


def _adaptive(node: OpNode) -> str | None:
    sizes = node.args[1]
    if isinstance(sizes, (list, tuple)) and all(size == 1 for size in sizes):
        return None
    return "only the average over a whole image or row has a form in ONNX"


def _pooling(node: OpNode) -> str | None:
    ceil_mode, divisor = node.args[4], node.args[6]
    if ceil_mode is False and divisor is None:
        return None
    return "ceil_mode and divisor_override have another meaning in ONNX"


def _floats(node: OpNode) -> str | None:
    given = [v.dtype for v in values_in(node.args) if v.kind == "tensor"]
    if all(dtype is not None and dtype.is_floating_point for dtype in given):
        return None
    return "it is defined for floats alone in ONNX"


def _numbers(node: OpNode) -> str | None:
    if all(made.dtype is not torch.bool for made in node.outputs):
        return None
    return "there is no arithmetic on bools in ONNX"


def _rolled(node: OpNode) -> str | None:
    if not any(isinstance(shift, ValueInfo) for shift in node.args[1]):
        return None
    return "it rolls by a size, and the exporter knows numbers only"


def _contracted(node: OpNode) -> str | None:
    equation = node.args[0]
    if isinstance(equation, str) and "..." not in equation:
        return None
    return "axes that stand behind an ellipsis come out with other sizes"


ARGUMENTS: dict[str, Check] = {
    "einsum.default": _contracted,
    "pow.Tensor_Scalar": _power,
    **dict.fromkeys(("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default"), _adaptive),
    "avg_pool2d.default": _pooling,
    "roll.default": _rolled,
    **dict.fromkeys(("add.Tensor", "add.Scalar", "mul.Tensor", "mul.Scalar"), _numbers),
    **dict.fromkeys(
        (
            *("floor.default", "ceil.default", "trunc.default", "round.default", "isnan.default"),
            *("relu.default", "relu6.default", "hardtanh.default"),
            *("softmax.int", "log_softmax.int"),
        ),
        _floats,
    ),
}
"""Overloads of ``aten`` that are translated only with some arguments."""

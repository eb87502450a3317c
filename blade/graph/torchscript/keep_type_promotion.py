# SPDX-License-Identifier: Apache-2.0
"""Rewrites 0-d constants so that TorchScript's executor keeps the model's type promotion.

    aten::add(%x, %c, 1)              ->  aten::add(%c, %x, 1)           the same for mul
    aten::sub(%x, %c, 1)              ->  aten::add(%minus_c, %x, 1)
    aten::div(%x, %c)                 ->  aten::div(%x, %c, None)
    aten::floor_divide(%x, {2.5})     ->  aten::floor_divide(%x, 2.5)    a Python number of the tracer's

The executor (``CanonicalizeOps``) converts the second operand ``%c`` of add, sub, mul and div to a number,
which promotes less than a tensor: ``int64[3] * c`` with a float16 ``c`` becomes float16 instead of
float32. A bool becomes an operand without an overload: every call of ``x + True`` fails. Such lines are
written so that the executor's pattern does not match.

The tracer stores the number of ``x // 2.5`` as a tensor that promotes like a number. A saved file loses
this mark: float32 becomes float64 after loading. Ops that the executor leaves alone get the number itself.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.core.jit_nodes import nodes_of

# Kind -> number of inputs of the executor's pattern; 0: no pattern.
_ONE: tuple[Any, ...] = (1,)
_FORMS = {"aten::add": 3, "aten::sub": 3, "aten::mul": 2, "aten::div": 2, "aten::floor_divide": 0}


def keep_type_promotion(graph: torch._C.Graph) -> None:
    """Rewrite ``graph`` and its nested blocks in place; the types noted by the tracer must still be there."""
    for node in list(nodes_of(graph)):
        if node.kind() not in _FORMS:
            continue
        constant = _constant(node.inputsAt(1))
        if constant is None:
            continue
        graph.setInsertPoint(node)
        if _FORMS[node.kind()] == len(list(node.inputs())):
            if _matters(node.inputsAt(0).type(), constant):
                _hide(graph, node, constant)
        elif not isinstance(constant, torch.Tensor | bool):
            node.replaceInput(1, _insert(graph, constant))
    graph.setInsertPoint(graph.block())


def _constant(value: torch._C.Value) -> torch.Tensor | bool | float | complex | None:
    """A 0-d constant: a tensor, or a number if it promotes like one; else ``None``."""
    if value.node().kind() != "prim::Constant" or value.type().kind() != "TensorType":
        return None
    constant: Any = value.toIValue()
    is_large = isinstance(constant, torch.Tensor) and constant.dim() > 0
    return None if is_large else constant


def _matters(beside: Any, constant: torch.Tensor | bool | float | complex) -> bool:
    """Whether a number would promote differently beside a tensor with dimensions, or have no overload."""
    if not isinstance(constant, torch.Tensor):
        return isinstance(constant, bool)
    if constant.dtype in (torch.int64, torch.get_default_dtype()):
        return False
    known: torch.dtype | None = beside.dtype() if beside.kind() == "TensorType" else None
    if known is None or constant.dtype is torch.bool:
        return True
    promoted: torch.dtype = torch.result_type(torch.empty(1, dtype=known), constant)
    return promoted != known


def _hide(
    graph: torch._C.Graph, node: torch._C.Node, constant: torch.Tensor | bool | float | complex
) -> None:
    own, other, *alpha = node.inputs()
    if node.kind() == "aten::div":
        node.addInput(_insert(graph, None))
        return
    if any(one.toIValue() not in _ONE for one in alpha):
        return
    if node.kind() == "aten::sub":
        if not isinstance(constant, torch.Tensor) or not constant.is_floating_point():
            return  # -c may overflow for integers; bools cannot be subtracted
        made = graph.create("aten::add", [_insert(graph, -constant), own, *alpha], 1)
        graph.insertNode(made)
        made.copyMetadata(node)
        made.output().setType(node.output().type())
        node.output().replaceAllUsesWith(made.output())
        node.destroy()
        return
    node.replaceInput(0, other)
    node.replaceInput(1, own)


def _insert(graph: torch._C.Graph, constant: Any) -> Any:
    return graph.insertConstant(constant)  # type: ignore[attr-defined]

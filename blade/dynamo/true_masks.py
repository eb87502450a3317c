# SPDX-License-Identifier: Apache-2.0
"""Masks of attention that hide nothing are dropped from a graph of Dynamo's.

    arange(197)[None, None, :, None] >= 0      a mask, however it is expanded
    scaled_dot_product_attention(q, k, v, attn_mask=that)       ->      scaled_dot_product_attention(q, k, v)

transformers builds such a mask for encoders while a model is compiled (5.17; in eager mode it passes none). Fused
kernels refuse it, for its strides of 0, and AOTAutograd then traces a softmax in float32 between two products.
Bounds of the mask's elements tell: those of `arange`, of sums with numbers, of comparisons, through views.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

_MASK = 3  # the position of an attention's mask
_IN_PLACE = (
    *(operator.setitem, operator.iadd, operator.isub, operator.imul),
    *(operator.iand, operator.ior, operator.ixor),
)


@dataclass(frozen=True)
class Bounds:
    """The least and the largest that an element may be; a boolean is 0 or 1."""

    least: float
    most: float


_TRUE, _FALSE, _EITHER = Bounds(1, 1), Bounds(0, 0), Bounds(0, 1)


def drop_true_masks(gm: GraphModule) -> None:
    """Change ``gm`` in place."""
    attentions = [node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention]
    if not attentions or any(map(_writes_whole_numbers, gm.graph.nodes)):
        return
    known: dict[Node, Bounds] = {}
    for node in gm.graph.nodes:
        found = _bounds(node, known)
        if found is not None:
            known[node] = found
    dropped = [node for node in attentions if _hides_nothing(node, known)]
    for node in dropped:
        if "attn_mask" in node.kwargs:
            node.kwargs = {**node.kwargs, "attn_mask": None}
        else:
            node.update_arg(_MASK, None)
    if dropped:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _writes_whole_numbers(node: Node) -> bool:
    """Whether ``node`` changes a tensor of booleans or whole numbers in place, such as a mask."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    in_place = node.target in _IN_PLACE or ends
    first = node.args[0].meta.get("example_value") if isinstance(node.args[0], Node) else None
    is_whole = isinstance(first, torch.Tensor) and not first.is_floating_point()
    return "out" in node.kwargs or (in_place and is_whole)


def _hides_nothing(node: Node, known: Mapping[Node, Bounds]) -> bool:
    mask = node.kwargs.get("attn_mask", node.args[_MASK] if len(node.args) > _MASK else None)
    if not isinstance(mask, Node) or known.get(mask) != _TRUE:
        return False
    like, made = mask.meta.get("example_value"), node.meta.get("example_value")
    if not isinstance(like, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    # a mask of more batches than the queries would repeat them
    query = node.args[0] if node.args else node.kwargs.get("query")
    given = query.meta.get("example_value") if isinstance(query, Node) else None
    return (
        like.dtype == torch.bool
        and isinstance(given, torch.Tensor)
        and given.dim() == made.dim()
        and all(
            statically_known_true(a == b)
            for a, b in zip(given.shape[:-1], made.shape[:-1], strict=True)
        )
    )


def _bounds(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
    if node.op == "call_method":
        rule = _METHODS.get(str(node.target))
    elif node.op == "call_function" and not isinstance(node.target, str):
        rule = _FUNCTIONS.get(node.target)
    else:
        return None
    if rule is None:
        return None
    return rule(node, known)


def _operand(value: Any, known: Mapping[Node, Bounds]) -> Bounds | None:
    if isinstance(value, Node):
        return known.get(value)
    return Bounds(value, value) if isinstance(value, (bool, int)) else None


Rule = Callable[[Node, Mapping[Node, Bounds]], Bounds | None]


def _arange(node: Node, _: Mapping[Node, Bounds]) -> Bounds | None:
    numbers = [*node.args]
    if len(numbers) not in (1, 2) or {"start", "end", "step"} & {*node.kwargs}:
        return None
    start, end = (0, numbers[0]) if len(numbers) == 1 else numbers
    if not isinstance(start, int):
        return None
    return Bounds(start, end - 1 if isinstance(end, int) else inf)


def _same(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
    """Of a view or of selected elements, ``x[None, :, 0]``; an item of a tuple has no bounds."""
    return _operand(node.args[0], known) if node.args else None


def _sum(sign: int) -> Rule:
    def bounds(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
        made = node.meta.get("example_value")
        if len(node.args) != 2 or not isinstance(made, torch.Tensor) or made.dtype != torch.int64:
            return None
        a, b = (_operand(value, known) for value in node.args)
        if a is None or b is None:
            return None
        low, high = (b.least, b.most) if sign > 0 else (-b.most, -b.least)
        return Bounds(a.least + low, a.most + high)

    return bounds


def _compared(always: Callable[[Bounds, Bounds], bool], never: Callable[..., bool]) -> Rule:
    def bounds(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
        if len(node.args) != 2:
            return None
        a, b = (_operand(value, known) for value in node.args)
        if a is None or b is None:
            return None
        return _TRUE if always(a, b) else _FALSE if never(a, b) else _EITHER

    return bounds


def _both(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
    """Of booleans; of numbers only where all are 0 or 1."""
    found = [_operand(value, known) for value in node.args]
    if len(found) == 2 and found == [_TRUE, _TRUE] and _is_boolean(node):
        return _TRUE
    return None


def _one_of(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
    found = [_operand(value, known) for value in node.args]
    return _TRUE if len(found) == 2 and _TRUE in found and _is_boolean(node) else None


def _ones(node: Node, _: Mapping[Node, Bounds]) -> Bounds | None:
    return _TRUE if _is_boolean(node) else None


def _is_boolean(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _cast(node: Node, known: Mapping[Node, Bounds]) -> Bounds | None:
    """Whole numbers that may not fit, and floats that may round, have no bounds."""
    found, value = _same(node, known), node.meta.get("example_value")
    if found is None or not isinstance(value, torch.Tensor):
        return None
    return found if value.dtype == torch.int64 or found == _TRUE else None


_AT_LEAST = _compared(lambda a, b: a.least >= b.most, lambda a, b: a.most < b.least)
_ABOVE = _compared(lambda a, b: a.least > b.most, lambda a, b: a.most <= b.least)
_AT_MOST = _compared(lambda a, b: a.most <= b.least, lambda a, b: a.least > b.most)
_BELOW = _compared(lambda a, b: a.most < b.least, lambda a, b: a.least >= b.most)
_FUNCTIONS: Mapping[Any, Rule] = {
    torch.arange: _arange,
    torch.ones: _ones,
    operator.getitem: _same,
    operator.add: _sum(1),
    operator.sub: _sum(-1),
    operator.ge: _AT_LEAST,
    operator.gt: _ABOVE,
    operator.le: _AT_MOST,
    operator.lt: _BELOW,
    operator.and_: _both,
    operator.or_: _one_of,
    torch.unsqueeze: _same,
}
_METHODS: Mapping[str, Rule] = {
    **dict.fromkeys(("expand", "view", "reshape", "unsqueeze", "squeeze", "contiguous"), _same),
    "new_ones": _ones,
    "to": _cast,
}

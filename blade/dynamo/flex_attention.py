# SPDX-License-Identifier: Apache-2.0
"""FlexAttention in a graph of Dynamo's becomes ops that engines take, forward and backward.

    flex_attention(q, k, v, score_mod, block_mask, scale)[0]     ->      attend(q, k, v, score_mod, mask_mod, scale)

AOTAutograd would run the operator as it is, outside of all engines. What is modified and masked is a graph of its own
there: no modification, no mask and a causal one are recognized.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.core.flex_attention import attend

_PLACES = 4  # batch, head, query, key
_ARGUMENTS = 7  # in torch 2.11 and 2.13; what the modification and the mask read comes behind


def lower_flex_attention(gm: GraphModule) -> bool:
    """Change ``gm`` in place, where only the attention itself is read of an operator's results; return whether it has.

    What made the block masks is left behind: AOTAutograd drops it.
    """
    found = False
    for node in list(gm.graph.nodes):
        if not _is_flex_attention(node):
            continue
        users = list(node.users)
        is_known = not node.kwargs and len(node.args) in (_ARGUMENTS, _ARGUMENTS + 2)
        if not is_known or not all(u.target is operator.getitem and u.args[1] == 0 for u in users):
            continue
        query, key, value, modify, blocks, scale, _, *buffers = node.args
        of_scores, of_masks = buffers or ((), ())
        mask = blocks[-1]
        scores, masks = _graph_of(gm, modify), _graph_of(gm, mask)
        if not (_reads_whole(scores, of_scores) and _reads_whole(masks, of_masks)):
            continue
        given: tuple[Any, ...] = (
            *(query, key, value, scale),
            *((None, ()) if _is_identity(scores) else (modify, of_scores)),
            *((None, ()) if _is_true(masks) else (mask, of_masks)),
            _is_causal(masks),
        )
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(_attend, given)
        for user in users:
            made.meta.update(user.meta)
            user.replace_all_uses_with(made)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        found = True
    if found:
        gm.recompile()
    return found


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    modify: Any,
    of_scores: Sequence[Any],
    mask: Any,
    of_masks: Sequence[Any],
    is_causal: bool,
) -> torch.Tensor:
    score_mod = None if modify is None else lambda *given: modify(*given, *of_scores)
    mask_mod = None if mask is None else lambda *given: mask(*given, *of_masks)
    return attend(query, key, value, score_mod, mask_mod, scale, is_causal)


def _is_flex_attention(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return bool(target.name() == "flex_attention")


def _graph_of(gm: GraphModule, node: Any) -> GraphModule | None:
    found = getattr(gm, str(node.target), None) if isinstance(node, Node) else None
    return found if isinstance(found, GraphModule) else None


def _inputs(graph: Any) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _result(graph: Any) -> Any:
    (found,) = graph.graph.output_node().args
    return found[0] if isinstance(found, (tuple, list)) and len(found) == 1 else found


def _is_identity(graph: Any) -> bool:
    return _result(graph) is _inputs(graph)[0]


def _is_true(graph: Any) -> bool:
    made = _result(graph)
    return isinstance(made, Node) and made.op == "call_method" and made.target == "new_ones"


def _is_causal(graph: Any) -> bool:
    """Whether a position counts exactly if the key's index is at most the query's."""
    made, inputs = _result(graph), _inputs(graph)
    if not isinstance(made, Node) or len(inputs) < _PLACES:
        return False
    query, key = inputs[2:_PLACES]
    orders = {operator.ge: (query, key), operator.le: (key, query)}
    return made.op == "call_function" and orders.get(made.target) == made.args  # type: ignore[arg-type]


def _reads_whole(graph: Any, given: Sequence[Any]) -> bool:
    """Whether each tensor that ``graph`` reads at an index is one of ``given``, read at an index per dimension."""
    if graph is None:
        return False
    inputs = _inputs(graph)
    buffers = dict(zip(inputs[len(inputs) - len(given) :], given, strict=True))
    for node in graph.graph.nodes:
        if node.target is operator.getitem:
            tensor, index = node.args
            known = buffers.get(tensor)
            value = known.meta.get("example_value") if isinstance(known, Node) else known
            count = len(index) if isinstance(index, tuple) else 1
            if not isinstance(value, torch.Tensor) or value.dim() != count:
                return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Replaces ops that an exporter cannot translate by torch's decompositions.

    decompose(graph, is_known, table, rewrites)       # in place; nodes' meta["val"] are kept and made

Only those nodes are traced (``run_decompositions`` traces the whole graph again, which is slow and may
specialize sizes needlessly).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from blade.core.torch_modes import oblivious_to_sizes

Table = Mapping[Any, Callable[..., Any]]


def decompose(graph: Graph, is_known: Callable[[Any], bool], table: Table, rewrites: Table) -> None:
    """Replace every call of an ATen op in ``rewrites`` or not ``is_known``.

    Ops that ``table`` and torch's composite ops do not reduce to known ops stay. ``rewrites`` are
    functional, and composite ops in them are kept.
    """
    for _ in range(_DEEPEST):
        calls = [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        pending = [n for n in calls if n.target in rewrites or not is_known(n.target)]
        for node in pending:
            _inline(graph, node, _parts(node, table, rewrites))


_DEEPEST = 3  # results of a rewrite may need decomposition too


def _parts(node: Node, table: Table, rewrites: Table) -> GraphModule:
    """The decomposition of ``node`` as a function of the nodes among its flattened arguments."""
    flat, form = tree_flatten((node.args, dict(node.kwargs)))
    places = [k for k, one in enumerate(flat) if isinstance(one, Node)]
    function: Any = rewrites.get(node.target, node.target)

    def call(*given: Any) -> Any:
        whole = list(flat)
        for place, value in zip(places, given, strict=True):
            whole[place] = value
        args, kwargs = tree_unflatten(whole, form)
        return function(*args, **kwargs)

    fakes = _apart([flat[place].meta["val"] for place in places])
    oblivious = oblivious_to_sizes()
    with oblivious, torch.no_grad():
        if node.target in rewrites:
            traced = make_fx(call, tracing_mode="symbolic", pre_dispatch=True)(*fakes)
        else:
            functional = torch.func.functionalize(call, remove="mutations")
            parts = dict(table)
            traced = make_fx(functional, decomposition_table=parts, tracing_mode="symbolic")(*fakes)
    assert isinstance(traced, GraphModule), traced
    return traced


def _apart(values: Sequence[Any]) -> list[Any]:
    """``values`` without repeated tensors: nodes may share one, and tracing identifies inputs by identity."""
    seen: set[int] = set()
    found = []
    for value in values:
        again = isinstance(value, torch.Tensor) and id(value) in seen
        found.append(value.detach() if again else value)
        seen.add(id(value))
    return found


def _inline(graph: Graph, node: Node, parts: GraphModule) -> None:
    flat, _ = tree_flatten((node.args, dict(node.kwargs)))
    given = iter([one for one in flat if isinstance(one, Node)])
    made: dict[Node, Any] = {}
    results: Any = None
    with graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "placeholder":
                made[part] = next(given)
            elif part.op == "output":
                results = torch.fx.map_arg(part.args[0], lambda n: made[n])
            elif part.op == "get_attr":
                made[part] = _constant(graph, part, parts)
            else:
                made[part] = graph.node_copy(part, lambda n: made[n])
                made[part].meta = dict(part.meta)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, user
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _constant(graph: Graph, part: Node, parts: GraphModule) -> Node:
    """A number that became a tensor during tracing; larger constants do not occur."""
    tensor = getattr(parts, str(part.target))
    assert tensor.numel() == 1, part
    full = graph.call_function(
        torch.ops.aten.full.default, (list(tensor.shape), tensor.item()), {"dtype": tensor.dtype}
    )
    full.meta = {"val": part.meta.get("val", tensor)}
    return full

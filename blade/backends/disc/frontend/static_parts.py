# SPDX-License-Identifier: Apache-2.0
"""Computes, once, what a graph looks up in or resamples from constants at sizes that are always the same.

    parts = static_parts(gm)             # {node: its tensor}

Capture folds what depends on constants alone. Position embeddings that are resampled to the size of an image, or
looked up at `arange(length)`, depend on sizes, too, which may be numbers by now. Other ops are cheap beside the kernel
that they fuse into, and what they make would take memory: they are folded only behind these.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
_LOOKUPS = (
    aten.embedding.default,
    aten.gather.default,
    aten.grid_sampler.default,
    aten.grid_sampler_2d.default,
    aten.index.Tensor,
    aten.index_select.default,
)
_RESAMPLES = ("aten::upsample_", "aten::_upsample_")
_MOST = 1 << 26
"""Bytes of a folded tensor, at most."""
_KEPT = (torch.int8, torch.uint8, torch.int32, torch.bool)
"""Dtypes of weights of 8 bits and fewer, which stay as they are, and of masks."""


def static_parts(gm: GraphModule) -> dict[Node, torch.Tensor]:
    """The tensors of nodes that no input reaches, looked up in or resampled from constants, and of what follows."""
    # Of the nodes that no input reaches; ``None``: not computed yet.
    known: dict[Node, torch.Tensor | None] = {}
    follows: set[Node] = set()  # those of them that are a constant, or computed from one
    folded: dict[Node, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and "val" in node.meta:
            tensor = attribute(gm, str(node.target))
            if tensor.dtype not in _KEPT:
                known[node] = tensor
                follows.add(node)
        elif _is_static(node) and all(n in known for n in node.all_input_nodes):
            known[node] = None
            if not any(n in follows for n in node.all_input_nodes):
                continue
            follows.add(node)
            if _begins(node) or any(n in folded for n in node.all_input_nodes):
                with torch.no_grad():
                    folded[node] = _computed(node, known)
    return {n: tensor for n, tensor in folded.items() if any(u not in folded for u in n.users)}


def only_for(parts: Collection[Node], gm: GraphModule) -> set[Node]:
    """The nodes that nothing but ``parts`` needs."""
    found: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.users and node not in parts and all(u in parts or u in found for u in node.users):
            found.add(node)
    return found


def attribute(gm: GraphModule, path: str) -> torch.Tensor:
    """The tensor of a ``get_attr`` node's target."""
    owner: Any = gm
    for part in path.split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, torch.Tensor), path
    return owner


def _is_static(node: Node) -> bool:
    """Whether the op of ``node`` gives one tensor of known sizes that its operands determine."""
    value, op = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or not isinstance(op, torch._ops.OpOverload):
        return False
    count = value.numel()
    return (
        isinstance(count, int)
        and count * value.element_size() <= _MOST
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not _has_symbols([*node.args, *node.kwargs.values()])
    )


def _has_symbols(arguments: Any) -> bool:
    if isinstance(arguments, (list, tuple)):
        return any(map(_has_symbols, arguments))
    return isinstance(arguments, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _begins(node: Node) -> bool:
    """Whether ``node`` looks up or resamples."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    return op in _LOOKUPS or op.name().startswith(_RESAMPLES)


def _computed(node: Node, known: dict[Node, torch.Tensor | None]) -> torch.Tensor:
    found = known[node]
    if found is None:

        def value(n: Node) -> Any:
            return _computed(n, known)

        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        known[node] = found = node.target(*args, **kwargs)  # type: ignore[operator]
    return found

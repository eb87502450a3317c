# SPDX-License-Identifier: Apache-2.0
"""Indices that a functional graph computes on the CPU are computed where they are read.

    arange (cpu) -> sub -> add -> index (cuda:0)        the first three on cuda:0
    arange (cpu) -> output, index (cuda:0)              a copy of it on cuda:0 for the index

A model may make the table of its relative positions on the CPU. Between it and what reads it on a GPU torch copies at
every call, and no cluster holds both. Whole numbers and booleans are the same on every device. A number that the model
writes into its table is a tensor of the module on the CPU, in graphs; it becomes a fill.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.dynamo.fold_numbers import fill, held_number

aten = torch.ops.aten
_CPU = torch.device("cpu")
_READERS = {
    aten.index.Tensor: 1,
    aten.index_put.default: 1,
    aten._unsafe_index.Tensor: 1,
    aten._unsafe_index_put.default: 1,
}
"""Ops that read indices of the CPU for tensors of a GPU, and the position of their list of indices."""


def move_index_tables(graph: Graph) -> None:
    """Change ``graph`` in place."""
    places = {device for node in graph.nodes for device in _devices_read(node)}
    if len(places) != 1:
        return
    [device] = places
    _fill_numbers(graph)
    moved: dict[Node, None] = {}
    for node in graph.nodes:
        if _may_move(node, moved):
            moved[node] = None
    before = -1
    while len(moved) != before:
        before = len(moved)
        moved = {node: None for node in moved if _is_free(node, moved)}
    for node in moved:
        if _device_argument(node) is not None:
            node.kwargs = {**node.kwargs, "device": device}
        node.meta["val"] = node.meta["val"].to(device)
    _copy_the_others(graph, device)


def _fill_numbers(graph: Graph) -> None:
    """Replace copies of whole numbers that the module holds on the CPU."""
    for node in list(graph.nodes):
        if node.target is not aten.lift_fresh_copy.default:
            continue
        (held,) = node.args
        number = held_number(graph, held)
        if number is None or number.is_floating_point() or number.is_complex():
            continue
        node.replace_all_uses_with(fill(graph, node, number, _CPU))
        graph.erase_node(node)
        if not held.users:
            graph.erase_node(held)


def _copy_the_others(graph: Graph, device: torch.device) -> None:
    """Copy what stays on the CPU once for all that read it: an input, or what the backward graph takes, too."""
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if not any(_devices_read(node)):
            continue
        place = _READERS[node.target]
        for index in dict.fromkeys(_listed(node.args[place])):
            if index.meta["val"].device != _CPU:
                continue
            if index not in copies:
                with graph.inserting_after(
                    _last_input(graph) if index.op == "placeholder" else index
                ):
                    made = graph.call_function(aten._to_copy.default, (index,), {"device": device})
                made.meta["val"] = index.meta["val"].to(device)
                copies[index] = made
            indices = [copies[index] if one is index else one for one in node.args[place]]
            node.update_arg(place, indices)


def _last_input(graph: Graph) -> Node:
    inputs: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs[-1]


def _devices_read(node: Node) -> Iterator[torch.device]:
    """The device other than the CPU on which ``node`` reads indices of the CPU."""
    place = _READERS.get(node.target)  # type: ignore[call-overload]
    if place is None or not isinstance(node.args[0], Node):
        return
    base = node.args[0].meta.get("val")
    if isinstance(base, torch.Tensor) and base.device != _CPU:
        indices = [one.meta.get("val") for one in _listed(node.args[place])]
        if any(isinstance(one, torch.Tensor) and one.device == _CPU for one in indices):
            yield base.device


def _listed(indices: Any) -> list[Node]:
    return [one for one in indices if isinstance(one, Node)]


def _may_move(node: Node, moved: dict[Node, None]) -> bool:
    """Whether ``node`` computes whole numbers on the CPU, of numbers or of ``moved`` nodes alone."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not isinstance(value, torch.Tensor) or value.device != _CPU:
        return False
    if value.is_floating_point() or value.is_complex():
        return False
    tags = node.target.tags
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    tensors = _tensors(node)
    if not tensors:
        return _device_argument(node) is not None
    return all(n in moved for n in tensors) and _device_argument(node) in (None, _CPU)


def _device_argument(node: Node) -> Any:
    """What ``node`` says of its device, the CPU if nothing; ``None`` if it has no such argument."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), node
    if not any(a.name == "device" for a in target._schema.arguments):
        return None
    return node.kwargs.get("device") or _CPU


def _is_free(node: Node, moved: dict[Node, None]) -> bool:
    """Whether ``node`` reads only ``moved`` nodes, and only they and ops of a GPU, as an index, read it."""
    if any(n not in moved for n in _tensors(node)):
        return False
    return all(user in moved or _reads_index(user, node) for user in node.users)


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _reads_index(user: Node, node: Node) -> bool:
    if not any(_devices_read(user)):
        return False
    place = _READERS[user.target]  # type: ignore[index]
    others = [a for k, a in enumerate(user.args) if k != place]
    return node in _listed(user.args[place]) and not any(a is node for a in others)

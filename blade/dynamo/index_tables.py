# SPDX-License-Identifier: Apache-2.0
"""Tables that a functional graph computes on the CPU are computed where they are read.

    arange (cpu) -> sub -> add -> index (cuda:0)            the first three on cuda:0
    arange (cpu) -> output, index (cuda:0)                  a copy of it on cuda:0 for the index
    arange (cpu) -> ge -> mul -> _to_copy (cuda:0)          all on cuda:0

A model may make the table of its relative positions, or its mask, on the CPU. Between it and what reads it on a GPU
torch copies at every call, and no cluster holds both. Whole numbers and booleans are the same on every device. Floats
move with them where the device is seen to give the same at the sample's sizes: whole numbers made of them at every
element. A number that the model writes into its table is a tensor of the module on the CPU, in graphs; it becomes a
fill.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from blade.core.torch_modes import out_of_compilation
from blade.dynamo.fold_numbers import fill, held_number
from blade.graph.shapes.fake_tensors import hint

aten = torch.ops.aten
_CPU = torch.device("cpu")
_READERS = {
    aten.index.Tensor: 1,
    aten.index_put.default: 1,
    aten._unsafe_index.Tensor: 1,
    aten._unsafe_index_put.default: 1,
}
"""Ops that read indices of the CPU for tensors of a GPU, and the position of their list of indices."""
_MOVES = frozenset(
    "arange cat clone copy expand full full_like index_select maximum minimum ones ones_like permute repeat "
    "scalar_tensor select select_scatter slice slice_scatter squeeze stack t transpose unsqueeze view zeros "
    "zeros_like _to_copy _unsafe_view".split()
)
"""Ops beside pointwise ones whose floats do not depend on an order of summation."""
_ROUNDINGS = 4
"""Units in the last place between floats of two devices."""


def move_index_tables(graph: Graph) -> None:
    """Change ``graph`` in place."""
    places = {device for node in graph.nodes for device in _devices_read(node)}
    if len(places) != 1:
        return
    [device] = places
    _fill_numbers(graph)
    moved = _find_moved(graph, with_floats=False)
    more = _find_moved(graph, with_floats=True)
    if len(more) > len(moved) and _are_alike(more, device):
        moved = more
    for node in filter(_is_copied_there, graph.nodes):
        if node.args[0] in moved:
            where = ("device", "non_blocking")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in where}
    for node in moved:
        if _device_argument(node) is not None:
            node.kwargs = {**node.kwargs, "device": device}
        node.meta["val"] = node.meta["val"].to(device)
    _copy_the_others(graph, device)


def _find_moved(graph: Graph, with_floats: bool) -> dict[Node, None]:
    """The nodes to move, in their order."""
    moved: dict[Node, None] = {}
    for node in graph.nodes:
        if _may_move(node, moved, with_floats):
            moved[node] = None
    before = -1
    while len(moved) != before:
        before = len(moved)
        moved = {node: None for node in moved if _is_free(node, moved)}
    return moved


def _are_alike(moved: dict[Node, None], device: torch.device) -> bool:
    """Whether ``device`` and the CPU compute alike what leaves ``moved``, at the sample's sizes."""
    if device.type == "meta" or not all(_is_known(n) for node in moved for n in _numbers(node)):
        return False
    try:
        found = [_computed(moved, place) for place in (_CPU, device)]
    except RuntimeError:  # the device has no such kernel, or no memory left
        return False
    return all(
        torch.allclose(a, b, rtol=_rounding(a), atol=0.0, equal_nan=True)
        for a, b in zip(*found, strict=True)
    )


def _computed(moved: dict[Node, None], place: torch.device) -> list[torch.Tensor]:
    """What others read of ``moved``, computed at ``place``."""
    made: dict[Node, Any] = {}

    def value_of(node: Node) -> Any:
        return made[node] if node in made else hint(node.meta["val"])

    for node in moved:
        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        if _device_argument(node) is not None:
            kwargs = {**kwargs, "device": place}
        with out_of_compilation(), torch.no_grad():
            made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    leaving = [node for node in moved if any(user not in moved for user in node.users)]
    return [made[node].cpu() for node in leaving]


def _numbers(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.Tensor)]


def _is_known(number: Node) -> bool:
    value = number.meta.get("val")
    return isinstance(value, int) or (isinstance(value, torch.SymInt) and value.node.has_hint())


def _rounding(value: torch.Tensor) -> float:
    return _ROUNDINGS * torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0


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
        if node.target not in _READERS or not any(_devices_read(node)):
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
    """The device other than the CPU on which ``node`` reads indices of the CPU, or to which it copies."""
    if _is_copied_there(node):
        yield node.meta["val"].device
    place = _READERS.get(node.target)  # type: ignore[call-overload]
    if place is None or not isinstance(node.args[0], Node):
        return
    base = node.args[0].meta.get("val")
    if isinstance(base, torch.Tensor) and base.device != _CPU:
        indices = [one.meta.get("val") for one in _listed(node.args[place])]
        if any(isinstance(one, torch.Tensor) and one.device == _CPU for one in indices):
            yield base.device


def _is_copied_there(node: Node) -> bool:
    """Whether ``node`` copies a tensor of the CPU, and is none."""
    if node.target is not aten._to_copy.default:
        return False
    pair = [one.meta.get("val") for one in (node.args[0], node) if isinstance(one, Node)]
    known = [one.device for one in pair if isinstance(one, torch.Tensor)]
    return len(known) == 2 and known[0] == _CPU != known[1]


def _listed(indices: Any) -> list[Node]:
    return [one for one in indices if isinstance(one, Node)]


def _may_move(node: Node, moved: dict[Node, None], with_floats: bool) -> bool:
    """Whether ``node`` computes on the CPU, of numbers or of ``moved`` nodes alone, whole numbers or such floats."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not isinstance(value, torch.Tensor) or value.device != _CPU:
        return False
    tags = node.target.tags
    is_exact = torch.Tag.pointwise in tags or _name(node.target) in _MOVES
    if value.is_complex() or (value.is_floating_point() and not (with_floats and is_exact)):
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    tensors = _tensors(node)
    if not tensors:
        return _device_argument(node) is not None
    return all(n in moved for n in tensors) and _device_argument(node) in (None, _CPU)


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def _device_argument(node: Node) -> Any:
    """What ``node`` says of its device, the CPU if nothing; ``None`` if it has no such argument."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), node
    if not any(a.name == "device" for a in target._schema.arguments):
        return None
    return node.kwargs.get("device") or _CPU


def _is_free(node: Node, moved: dict[Node, None]) -> bool:
    """Whether ``node`` reads only ``moved`` nodes, and its readers move, copy it to a GPU or take it as an index."""
    if any(n not in moved for n in _tensors(node)):
        return False
    return all(
        user in moved or _is_copied_there(user) or _reads_index(user, node) for user in node.users
    )


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _reads_index(user: Node, node: Node) -> bool:
    if user.target not in _READERS or not any(_devices_read(user)):
        return False
    place = _READERS[user.target]
    others = [a for k, a in enumerate(user.args) if k != place]
    return node in _listed(user.args[place]) and not any(a is node for a in others)

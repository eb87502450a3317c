# SPDX-License-Identifier: Apache-2.0
"""Numbers that a functional graph computes on the CPU, of constants alone, are computed while it is compiled.

    tensor(64.) (cpu) -> sqrt -> div(scores, .) (cuda:0)    becomes    full([], 8., device=cuda:0) -> div(scores, .)

DeBERTa and Swin-V2 scale their scores so. torch gives a GPU's kernel the element of such a tensor, but no cluster of
the GPU holds what the CPU computes.
"""

from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from blade.core.torch_modes import out_of_compilation

aten = torch.ops.aten
_CPU = torch.device("cpu")
_COPIES = (aten.lift_fresh_copy.default, aten._to_copy.default, aten.clone.default)


def fold_numbers(graph: Graph) -> None:
    """Change ``graph`` in place."""
    known: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        if (held := held_number(graph, node)) is not None:
            known[node] = held
        elif _is_computable(node, known):
            given = map_arg((node.args, node.kwargs), known.__getitem__)
            with out_of_compilation(), torch.no_grad():
                known[node] = node.target(*given[0], **given[1])
    for node, number in known.items():
        for device in dict.fromkeys(_places(user) for user in node.users):
            if device is not None and not number.is_complex():
                made = fill(graph, node, number, device)
                for user in [one for one in node.users if _places(one) == device]:
                    user.replace_input_with(node, made)


def held_number(graph: Graph, node: Any) -> torch.Tensor | None:
    """The tensor of the CPU, without axes, that ``node`` reads from the module of ``graph``, if it does."""
    if not isinstance(node, Node) or node.op != "get_attr" or graph.owning_module is None:
        return None
    held = attrgetter(str(node.target))(graph.owning_module)
    return held if type(held) is torch.Tensor and held.device == _CPU and not held.ndim else None


def _is_computable(node: Node, known: dict[Node, torch.Tensor]) -> bool:
    """Whether ``node`` is a number of the CPU, computed of ``known`` ones and nothing else."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return False
    if value.ndim or value.device != _CPU or target._schema.is_mutable:
        return False
    is_pure = target in _COPIES or torch.Tag.pointwise in target.tags
    is_drawn = torch.Tag.nondeterministic_seeded in target.tags
    inputs = node.all_input_nodes
    return is_pure and not is_drawn and bool(inputs) and all(one in known for one in inputs)


def _places(user: Node) -> torch.device | None:
    """The device other than the CPU on which ``user`` computes with an element of a tensor of the CPU."""
    target, value = user.target, user.meta.get("val")
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    if not is_pointwise or not isinstance(value, torch.Tensor) or value.device == _CPU:
        return None
    return value.device


def fill(graph: Graph, node: Node, number: torch.Tensor, device: torch.device) -> Node:
    """A tensor on ``device`` that holds ``number``, instead of ``node``."""
    with graph.inserting_after(node), out_of_compilation():
        form: dict[str, Any] = {"dtype": number.dtype, "device": device}
        made = graph.call_function(aten.full.default, ([], number.item()), form)
    made.meta = {**node.meta, "val": node.meta["val"].to(device)}
    return made

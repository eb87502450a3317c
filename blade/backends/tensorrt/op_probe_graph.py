# SPDX-License-Identifier: Apache-2.0
"""Single ops, side by side in one graph, so that an exporter and a parser see all of them in one run.

    probes = [op_probe_of(node) for node in nodes]       # None for a node that cannot be called alone
    cluster = probe_graph(probes)                        # its outputs: those of the first probe, of the second ...

Each op gets inputs and constants of its own, with the sizes of its tensors at the first sample. Numbers that
are known only at run time are made up, if possible such that the op's results have the same sizes as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.core.cluster import Cluster, OpNode, ValueInfo
from blade.core.torch_modes import dispatched_in_python
from blade.graph.shapes.shape_functions import result_of

aten = torch.ops.aten
CANNOT = (
    *(RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError),
    *(NotImplementedError, AssertionError, ZeroDivisionError),
)
"""Exceptions of torch for arguments that an op does not accept."""


@dataclass(frozen=True)
class ProbeTensor:
    """A tensor argument, by its index among the probe's tensors."""

    index: int


@dataclass(frozen=True)
class OpProbe:
    """One call. ``results`` are indices of its returned tensors, ``None`` for a single tensor."""

    target: torch._ops.OpOverload
    leaves: tuple[ValueInfo, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]


def op_probe_of(node: OpNode) -> OpProbe | None:
    """A probe of ``node``; ``None`` if a size is unknown, or torch rejects the made-up arguments."""
    leaves: list[ValueInfo] = []
    names = [a.name for a in node.target._schema.arguments]
    args = tuple(_given(node, name, a, leaves) for name, a in zip(names, node.args))
    kwargs = {name: _given(node, name, a, leaves) for name, a in node.kwargs.items()}
    if any(v.shape is None or v.dtype is None for v in leaves):
        return None
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes = [torch.empty(v.shape or (), dtype=v.dtype) for v in leaves]
    try:
        made = _compute(mode, node.target, *_linked((args, kwargs), fakes))
    except CANNOT:
        return None
    if isinstance(made, torch.Tensor):
        return OpProbe(node.target, tuple(leaves), args, kwargs, (None,))
    if not isinstance(made, (list, tuple)):
        return None
    tensors = tuple(k for k, one in enumerate(made) if isinstance(one, torch.Tensor))
    return OpProbe(node.target, tuple(leaves), args, kwargs, tensors) if tensors else None


def probe_graph(islands: Sequence[OpProbe]) -> Cluster:
    """One cluster of all probes, with fixed sizes and dense outputs."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    root, graph = torch.nn.Module(), Graph()
    leaves = [[_place(graph, mode, v) for v in i.leaves if not v.constant] for i in islands]
    returned: list[Node] = []
    for island, inputs in zip(islands, leaves, strict=True):
        given = iter(inputs)
        nodes = [_hold(graph, mode, root, v) if v.constant else next(given) for v in island.leaves]
        args, kwargs = _linked((island.args, island.kwargs), nodes)
        call = _call(graph, mode, island.target, args, kwargs)
        for k in island.results:
            one = call if k is None else _call(graph, mode, getitem, (call, k), {})
            dense = {"memory_format": torch.contiguous_format}
            returned.append(_call(graph, mode, aten.clone.default, (one,), dense))
    graph.output(tuple(returned))
    graph.lint()
    return Cluster("survey", GraphModule(root, graph), shape_env, (), ())


def _given(node: OpNode, name: str, value: Any, leaves: list[ValueInfo], at: int = 0) -> Any:
    if isinstance(value, (list, tuple)):
        return [_given(node, name, one, leaves, k) for k, one in enumerate(value)]
    if not isinstance(value, ValueInfo):
        return value
    if value.kind == "tensor":
        leaves.append(value)
        return ProbeTensor(len(leaves) - 1)
    return {"int": _number(node, name, at), "float": 1.0, "bool": False}.get(value.kind)


def _number(node: OpNode, name: str, at: int) -> int:
    """A value for an int that is known only at run time: mostly a size, then one of the result's."""
    result = node.outputs[0].shape if node.outputs else None
    kind = node.target._schema.name
    if kind in ("aten::slice", "aten::select", "aten::narrow") or result is None:
        axis = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else 0
        is_end = name in ("end", "length") and result is not None and axis < len(result)
        return result[axis] if is_end and result is not None else 0
    return result[at] if at < len(result) else 1


def _linked(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, ProbeTensor):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _linked(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_linked(one, tensors) for one in value)
    return value


def _place(graph: Graph, mode: FakeTensorMode, info: ValueInfo) -> Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    with mode:
        node.meta["val"] = torch.empty(info.shape or (), dtype=info.dtype)
    return node


def _hold(graph: Graph, mode: FakeTensorMode, root: torch.nn.Module, info: ValueInfo) -> Node:
    """A constant of zeros: the contents of large constants are never read."""
    name = f"const_{len(list(root.buffers()))}"
    root.register_buffer(name, torch.zeros(info.shape or (), dtype=info.dtype))
    node = graph.get_attr(name)
    node.meta["val"] = mode.from_tensor(root.get_buffer(name), static_shapes=True)
    return node


def _call(graph: Graph, mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Node:
    node = graph.call_function(target, tuple(args), kwargs)
    fakes = torch.fx.map_arg((tuple(args), kwargs), lambda n: n.meta["val"])
    node.meta["val"] = _compute(mode, target, *fakes)
    return node


def _compute(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), mode, dispatched_in_python():
        return result_of(target, args, kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Ops, values and clusters: the input of every backend."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


SCALAR_BYTES = 8
"""The weight of an edge that carries sizes or scalars only."""


_OFF = {"train": False, "training": False, "p": 0, "dropout": 0, "dropout_p": 0}
"""Arguments that switch the randomness of an op off, with the value that does so."""


@dataclass(frozen=True)
class ValueInfo:
    """Facts about one value from running the samples; ``None`` means unknown.

    ``shape`` has the sizes at the first sample; other calls have other sizes. A ``constant`` tensor belongs
    to the model. ``is_size``: a 0-d integer tensor that tracing made from a size; each op that needs it gets
    a new one, on the op's device. ``is_read``: an int computed from one that is read out of a tensor.
    """

    kind: str  # "tensor", "int", "float", "bool", "list", "str", "none", "other"
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    rank: int | None = None
    shape: tuple[int, ...] | None = field(default=None, compare=False)
    constant: bool = field(default=False, compare=False)
    is_size: bool = field(default=False, compare=False)
    is_read: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class OpNode:
    """One op of the captured graph, as a backend sees it.

    ``target`` is the ATen overload (``torch.ops.aten.add.Tensor``). ``args``/``kwargs`` are bound to
    the schema; a constant argument is its Python value, anything else is a ``ValueInfo`` (or a list
    of them). ``late_sizes``: torch.compile knows that a size of an operand or a result depends on elements.
    ``body``: the ops of a loop, which a backend takes all or not at all.
    """

    name: str
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[ValueInfo, ...]
    source: str = ""
    late_sizes: bool = False
    body: tuple["OpNode", ...] = ()


@dataclass(frozen=True)
class Cluster:
    """A convex group of ops, self-contained.

    ``gm`` takes one placeholder per entry of ``inputs`` (tensors, in this order) and returns a tuple of
    tensors. Constants are ``get_attr`` nodes over ``gm``'s attributes ``const_0`` ..., which are the
    fallback's own tensors (no copies). ``node.meta["val"]`` of every node is a fake tensor or a SymInt, made
    under ``shape_env``; ``shape_env.guards`` are the assumptions of the shapes. ``samples``: real inputs, one
    tuple per sample of the user. ``probes``: the same at derived shapes, all of which the user's model
    accepts. ``calibration``: inputs at further samples, used for their values only; each iteration runs the
    model again. ``updates``: indices of inputs that are written to: the last results of ``gm`` are not
    returned but are the new contents of these inputs, in order. Nodes of ``aten.copy_`` show them to a
    backend. ``live``: the constants remain the caller's, who may write to them at any time, even without
    bumping a version counter. ``traced``: of a graph of torch.compile; the ops around the cluster rely on the
    layouts that ``gm`` says, whatever the original returns.
    """

    name: str
    gm: torch.fx.GraphModule
    shape_env: "ShapeEnv"
    inputs: tuple[ValueInfo, ...]
    ops: tuple[str, ...]
    samples: Sequence[tuple[torch.Tensor, ...]] = field(default=())
    probes: Sequence[tuple[torch.Tensor, ...]] = field(default=())
    calibration: Iterable[tuple[torch.Tensor, ...]] = field(default=())
    live: bool = False
    traced: bool = False
    updates: tuple[int, ...] = ()


def has_late_sizes(cluster: Cluster) -> bool:
    """Whether a size in ``cluster`` depends on elements."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return any(symbol_is_type(s, SymT.UNBACKED_INT) for s in cluster.shape_env.var_to_range)


def values_in(args: Any) -> Iterator[ValueInfo]:
    """The values among the arguments of an ``OpNode``, those in lists included; constants are not."""
    for arg in args:
        if isinstance(arg, ValueInfo):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from values_in(arg)


def device_of(cluster: Cluster) -> torch.device:
    """The device of the cluster: all its ops are on one device, but for numbers, which are 0-d tensors of the CPU."""
    calls = (n.meta.get("val") for n in cluster.gm.graph.nodes if n.op == "call_function")
    devices = (value.device for value in calls if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def unknown_target() -> torch._ops.OpOverload:
    """The ``OpNode.target`` of nodes that are no ATen ops; such nodes are excluded."""
    target = torch.ops.aten._assert_async.msg
    assert isinstance(target, torch._ops.OpOverload)
    return target


def reads_sizes(node: OpNode) -> bool:
    """Whether an argument is an int that is read out of a tensor."""
    return any(v.is_read for v in values_in((*node.args, *node.kwargs.values())))


_MAKE_SIZES = ("aten::where", "aten::nonzero_numpy", "torchvision::nms")
"""Ops whose results' sizes depend on elements without a tag that says so; ``where`` with one argument."""


def makes_sizes(node: OpNode) -> bool:
    """Whether sizes of the results depend on elements: of the op's operands, or of what an int was read from.

    In a graph of torch.compile, also whether an operand has such a size.
    """
    if reads_sizes(node) or node.late_sizes:
        return True
    target, name = node.target, node.target._schema.name
    if target is torch.ops.aten.one_hot.default:
        return not (len(node.args) > 1 and type(node.args[1]) is int and node.args[1] > 0)
    if target is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8, None)
        return any(i.dtype in masks for i in values_in(node.args[1:]))
    if target is torch.ops.aten.repeat_interleave.self_Tensor:
        return node.kwargs.get("output_size") is None
    if name in _MAKE_SIZES:
        return len(node.args) == 1 or name != "aten::where"
    return torch.Tag.dynamic_output_shape in target.tags


def is_random(node: OpNode) -> bool:
    """Whether the op, with its constant arguments, draws from a random generator."""
    return draws_numbers(node.target, node.args, node.kwargs)


def draws_numbers(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call of ``target`` draws from a random generator: attention does with a dropout above 0 alone."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given |= dict(zip([a.name for a in target._schema.arguments if not a.kwarg_only], args))
    given |= kwargs
    return not any(
        isinstance(given[name], (bool, int, float)) and given[name] == off
        for name, off in _OFF.items()
        if name in given
    )

# SPDX-License-Identifier: Apache-2.0
"""ONNX ops on tensors of few integers that the host knows: shapes, and what is computed from them.

    host_result(e, node, (HostValue([n0, 12]), ConstantValue(0)), torch.int64)       # Gather: HostValue(n0)

``None`` says that the op has to run on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from blade.importers.onnx.emit import host_numbers as on
from blade.importers.onnx.emit.emitter import HOST_ELEMENTS, Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView
from blade.importers.onnx.emit.values import Array, HostValue, Value

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}
_DTYPES = (torch.int64, torch.int32, torch.bool)


def host_result(
    e: Emitter, node: NodeView, inputs: Sequence[Value | None], dtypes: Sequence[torch.dtype | None]
) -> tuple[HostValue, ...] | None:
    """What the node computes, if all its inputs are host values or small constants."""
    rule = _RULES.get(node.op)
    if rule is None or node.domain or not any(isinstance(one, HostValue) for one in inputs):
        return None
    if any(one not in _DTYPES for one in dtypes):
        return None
    arrays = [None if one is None else e.host(one) for one in inputs]
    if any(array is None for array, one in zip(arrays, inputs) if one is not None):
        return None
    try:
        found = rule(e, node, *arrays)
    except (
        NotImported,
        IndexError,
        ValueError,
        TypeError,
    ):  # int() of a number that has a name only
        return None
    results = [_objects(one) for one in (found if isinstance(found, list) else [found])]
    if any(one.size > HOST_ELEMENTS for one in results):
        return None
    return tuple(HostValue(one, dtype) for one, dtype in zip(results, dtypes) if dtype is not None)


def _objects(array: Any) -> Array:
    made = np.empty(np.shape(array), dtype=object)
    made[...] = array
    return made


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _pointwise(name: str, function: Rule) -> None:
    _RULES[name] = lambda e, node, *arrays: on.each(function, e, *arrays)


_POINTWISE: dict[str, Rule] = {
    "Add": on.add,
    "Sub": on.sub,
    "Mul": on.mul,
    "Div": on.div,
    "Neg": on.neg,
    "Abs": on.absolute,
    "Equal": on.equal,
    "Less": on.less,
    "And": on.conjunction,
    "Or": on.disjunction,
    "Not": on.negation,
    "Where": on.choose,
}
for _name, _function in _POINTWISE.items():
    _pointwise(_name, _function)

_RULES["Greater"] = lambda e, node, a, b: on.each(on.less, e, b, a)
_RULES["LessOrEqual"] = lambda e, node, a, b: on.each(on.negation, e, on.each(on.less, e, b, a))
_RULES["GreaterOrEqual"] = lambda e, node, a, b: on.each(on.negation, e, on.each(on.less, e, a, b))


@_rule("Mod")
def _mod(e: Emitter, node: NodeView, a: Array, b: Array) -> Array:
    if node.int("fmod", 0):
        raise NotImported("The remainder has the sign of the dividend.")
    return on.each(on.mod, e, a, b)


@_rule("Min")
def _min(e: Emitter, node: NodeView, *arrays: Array) -> Array:
    return reduce(lambda a, b: on.each(on.minimum, e, a, b), arrays)


@_rule("Max")
def _max(e: Emitter, node: NodeView, *arrays: Array) -> Array:
    return reduce(lambda a, b: on.each(on.maximum, e, a, b), arrays)


@_rule("Identity")
def _identity(e: Emitter, node: NodeView, a: Array) -> Array:
    return a


@_rule("Cast")
def _cast(e: Emitter, node: NodeView, a: Array) -> Array:
    to = on.as_bool if node.int("to", 0) == 9 else on.as_int
    return on.each(to, e, a)


@_rule("Gather")
def _gather(e: Emitter, node: NodeView, a: Array, indices: Array) -> Array:
    return np.take(a, indices.astype(np.int64), axis=node.int("axis", 0))


@_rule("Concat")
def _concat(e: Emitter, node: NodeView, *arrays: Array) -> Array:
    return np.concatenate(arrays, axis=node.int("axis", 0))


@_rule("Unsqueeze")
def _unsqueeze(e: Emitter, node: NodeView, a: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(a, tuple(_axes(node, axes) or ()))


@_rule("Squeeze")
def _squeeze(e: Emitter, node: NodeView, a: Array, axes: Array | None = None) -> Array:
    found = _axes(node, axes)
    return np.squeeze(a, None if found is None else tuple(found))


@_rule("Reshape")
def _reshape(e: Emitter, node: NodeView, a: Array, shape: Array) -> Array:
    return a.reshape([int(one) for one in shape])


@_rule("Expand")
def _expand(e: Emitter, node: NodeView, a: Array, shape: Array) -> Array:
    sizes = tuple(int(one) for one in shape)
    return np.broadcast_to(a, np.broadcast_shapes(a.shape, sizes))


@_rule("Tile")
def _tile(e: Emitter, node: NodeView, a: Array, repeats: Array) -> Array:
    return np.tile(a, [int(one) for one in repeats])


@_rule("Slice")
def _slice(
    e: Emitter,
    node: NodeView,
    a: Array,
    starts: Array | None = None,
    ends: Array | None = None,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    first = node.ints("starts") or [] if starts is None else [int(one) for one in starts]
    last = node.ints("ends") or [] if ends is None else [int(one) for one in ends]
    along = node.ints("axes") if axes is None else [int(one) for one in axes]
    step = [1] * len(first) if steps is None else [int(one) for one in steps]
    index = [slice(None)] * a.ndim
    for k, axis in enumerate(along or range(len(first))):
        end: int | None = last[k]
        if step[k] < 0 and last[k] < -a.shape[axis]:
            end = None
        index[axis] = slice(first[k], end, step[k])
    return a[tuple(index)]


@_rule("Split")
def _split(e: Emitter, node: NodeView, a: Array, split: Array | None = None) -> list[Array]:
    axis = node.int("axis", 0)
    sizes = node.ints("split") if split is None else [int(one) for one in split]
    if sizes is None:
        chunk = -(-a.shape[axis] // len(node.outputs))
        return np.split(a, range(chunk, a.shape[axis], chunk), axis)
    return np.split(a, np.cumsum(sizes)[:-1].tolist(), axis)


@_rule("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(e: Emitter, node: NodeView, a: Array, axes: Array | None = None) -> Array:
    named = _axes(node, axes)
    if a.ndim > 1 or (named is None and node.int("noop_with_empty_axes", 0)) or not a.size:
        raise NotImported("A reduction of a matrix.")
    combine = {"Prod": on.mul, "Sum": on.add, "Max": on.maximum, "Min": on.minimum}[node.op[6:]]
    total = reduce(lambda x, y: combine(e, x, y), a.flat)
    return _objects([total] if a.ndim and node.int("keepdims", 1) else total)


def _axes(node: NodeView, axes: Array | None) -> list[int] | None:
    return node.ints("axes") if axes is None else [int(one) for one in axes.flat]

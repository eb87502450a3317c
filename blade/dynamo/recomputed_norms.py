# SPDX-License-Identifier: Apache-2.0
"""Backward computes a norm's result again from what the norm's own gradient saves.

    y, mean, rstd = native_group_norm(x, ...)
    joint:    y = normalized(x, weight, bias, mean, rstd)     which the min-cut may put on either side
    forward:  y again
    backward: y = (x - mean) * rstd * weight + bias           in pointwise ops, which fuse with what reads it

The gradient of the norm saves ``x`` and its statistics. Without this the result is saved, too, for the gradient of the
activation behind it, since a norm itself is not computed twice.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.core.dtypes import HALVES

aten = torch.ops.aten

_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_TRAINING = 5  # argument of _BATCH_NORM
_GROUP_NORM = aten.native_group_norm.default
_LAYER_NORM = aten.native_layer_norm.default
_NORMS = (_BATCH_NORM, _GROUP_NORM, _LAYER_NORM)
_PARAMETERS = {_LAYER_NORM: (2, 3)}
"""Positions of weight and bias, where they are not (1, 2)."""


def normalized(norm: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any) -> Any:
    """Stands in joint graphs for the first result of ``norm``, which has these statistics; nothing calls it."""
    raise NotImplementedError


def mark_norms(joint: Graph) -> None:
    """Replace the first results of norms in training by ``normalized``, where statistics are not rounded."""
    for norm in list(joint.nodes):
        if norm.target not in _NORMS or (norm.target is _BATCH_NORM and not norm.args[_TRAINING]):
            continue
        results = {user.args[1]: user for user in norm.users}
        if not {0, 1, 2} <= results.keys():
            continue
        y, mean, rstd = (results[k] for k in range(3))
        x = norm.args[0]
        exact = _wide(x) == mean.meta["val"].dtype == rstd.meta["val"].dtype
        if exact and (norm.target is not _GROUP_NORM or isinstance(x.meta["val"].shape[1], int)):
            for one in (y, rstd, mean):
                norm.append(one)  # moves it
            weight, bias = (norm.args[k] for k in _PARAMETERS.get(norm.target, (1, 2)))
            y.target, y.args = normalized, (norm.target, x, weight, bias, mean, rstd)


def _wide(x: Node) -> torch.dtype:
    """In which dtype a norm of ``x`` computes."""
    dtype: torch.dtype = x.meta["val"].dtype
    return torch.float32 if dtype in HALVES else dtype


def restore_norms(forward: Graph) -> None:
    """Replace each ``normalized`` by the norm's own result."""
    for node in forward.nodes:
        if node.target is normalized:
            mean: Any = node.args[4]
            node.target, node.args = operator.getitem, (mean.args[0], 0)


def write_norms_out(backward: Graph) -> None:
    """Replace each ``normalized`` by pointwise ops."""
    for node in list(backward.nodes):
        if node.target is normalized:
            with backward.inserting_before(node):
                made = _Written(backward, node).result()
            node.replace_all_uses_with(made)
            backward.erase_node(node)


class _Written:
    """Pointwise ops for ``node``."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._meta = graph, node.meta
        args: Any = node.args
        self._norm, self._x, *rest = args
        self._parameters, self._statistics = rest[:2], rest[2:]

    def result(self) -> Node:
        weight, bias = self._parameters
        mean, scale = self._statistics
        by_row = self._norm is _LAYER_NORM
        if not by_row:
            mean, scale = self._each_channel(mean), self._each_channel(scale)
            weight = None if weight is None else self._each_channel(weight)
            bias = None if bias is None else self._each_channel(bias)
        if weight is not None and not by_row:  # few values
            scale, weight = self._make(aten.mul.Tensor, scale, weight), None
        y = self._make(aten.sub.Tensor, self._cast(self._x, _wide(self._x)), mean)
        y = self._make(aten.mul.Tensor, y, scale)
        if weight is not None:
            y = self._make(aten.mul.Tensor, y, weight)
        if bias is not None:
            y = self._make(aten.add.Tensor, y, bias)
        return self._cast(y, self._meta["val"].dtype)

    def _each_channel(self, values: Node) -> Node:
        """[C], or [N, groups], in a form that broadcasts over [N, C, ...]."""
        image = self._x.meta["val"]
        ones = [1] * (image.dim() - 2)
        if values.meta["val"].dim() == 1:
            return self._make(aten.view.default, values, [-1, *ones])
        channels, groups = image.shape[1], values.meta["val"].shape[1]
        if channels != groups:
            values = self._make(aten.unsqueeze.default, values, 2)
            values = self._make(aten.expand.default, values, [-1, -1, channels // groups])
            values = self._make(aten.clone.default, values, memory_format=torch.contiguous_format)
        return self._make(aten.view.default, values, [-1, channels, *ones])

    def _cast(self, x: Node, dtype: torch.dtype) -> Node:
        return (
            x if x.meta["val"].dtype == dtype else self._make(aten._to_copy.default, x, dtype=dtype)
        )

    def _make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self._graph.call_function(target, args, kwargs)
        value = target(*_values(args), **kwargs)
        made.meta = {**self._meta, "val": value}
        return made


def _values(args: Sequence[Any]) -> list[Any]:
    return [a.meta["val"] if isinstance(a, Node) else a for a in args]

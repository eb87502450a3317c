# SPDX-License-Identifier: Apache-2.0
"""The work of a group of ops: how its time divides among kinds of ops, roughly, from their sizes.

    work = work_of(graph_view.nodes)
    work.distance(other)              # 0 for equal work; above NEAR the one says nothing about the other

The seconds are those of a nominal core (``FLOPS``, ``BYTES``). They compare graphs with each other and are
no estimate for any machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10, prod

import torch

from blade.core.cluster import OpNode, ValueInfo, values_in

FLOPS = 1e11  # floating-point operations per second of the nominal core
BYTES = 1e10  # bytes per second

KINDS = ("products", "convolutions", "grouped", "attention", "recurrent", "others")
"""Of ops; "grouped" are convolutions in groups, depthwise ones included."""

# Weights of the distance.
SIZE = 0.25  # for a factor of ten in the seconds
OPS = 0.25  # for a factor of ten in the number of ops

_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv"})
_ATTENTION = frozenset({"scaled_dot_product_attention"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"})


@dataclass(frozen=True)
class Work:
    """``seconds`` per entry of ``KINDS``, at the first sample, and the number of ``ops``."""

    seconds: tuple[float, ...]
    ops: int

    def distance(self, other: "Work") -> float:
        """How different two groups are: 2 for no kind in common, and more for other sizes."""
        mine, its = self._shares(), other._shares()
        mix = sum(abs(a - b) for a, b in zip(mine, its, strict=True))
        size = abs(log10(self._total() / other._total()))
        count = abs(log10(max(self.ops, 1) / max(other.ops, 1)))
        return mix + SIZE * size + OPS * count

    def _total(self) -> float:
        return max(sum(self.seconds), 1e-9)

    def _shares(self) -> list[float]:
        return [one / self._total() for one in self.seconds]


def work_of(nodes: Iterable[OpNode]) -> Work:
    """Return the work of ``nodes``; values of unknown sizes count nothing."""
    seconds, ops = dict.fromkeys(KINDS, 0.0), 0
    for node in nodes:
        kind, flops = _floating_point_operations(node)
        seconds[kind] += flops / FLOPS + _bytes_written(node) / BYTES
        ops += 1
    return Work(tuple(seconds.values()), ops)


def kind_of_work(node: OpNode) -> str:
    """Return the entry of ``KINDS`` that the time of ``node`` counts for."""
    return _floating_point_operations(node)[0]


def _floating_point_operations(node: OpNode) -> tuple[str, float]:
    name = node.target._schema.name.rpartition("::")[2].rstrip("_")
    if name in _PRODUCTS:
        operands = [v for v in values_in(node.args) if v.shape]
        inner = _shape(operands[-2])[-1] if len(operands) > 1 else 0
        return "products", 2.0 * _elements(node.outputs) * inner
    if "conv" in name and "convert" not in name:
        return _convolution(node)
    if name in _ATTENTION or "scaled_dot_product" in name:
        query, key = (_shape(v) for v in list(values_in(node.args))[:2])
        pairs = prod(query[:-1]) * (key[-2] if len(key) > 1 else 1)
        return "attention", 4.0 * pairs * (query[-1] if query else 0)
    if name in _RECURRENT:
        first, *rest = values_in(node.args)
        steps = prod(_shape(first)[:-1])
        return "recurrent", 2.0 * steps * sum(_elements([v]) for v in rest if v.rank == 2)
    return "others", 0.0


def _convolution(node: OpNode) -> tuple[str, float]:
    source, weight, *_ = values_in(node.args)
    shape = _shape(weight)
    by_name = dict(zip((a.name for a in node.target._schema.arguments), node.args))
    by_name.update(node.kwargs)
    moves = by_name.get("transposed") is True or "transpose" in node.target._schema.name
    places = _elements([source]) if moves else _elements(node.outputs)
    groups = by_name.get("groups", 1)
    kind = "grouped" if isinstance(groups, int) and groups > 1 else "convolutions"
    return kind, 2.0 * places * prod(shape[1:])


def _bytes_written(node: OpNode) -> float:
    if any(a.alias_info is not None for a in node.target._schema.returns):
        return 0.0  # a view
    return float(sum(_elements([v]) * _size(v.dtype) for v in node.outputs))


def _elements(values: Sequence[ValueInfo]) -> int:
    return sum(prod(v.shape) for v in values if v.shape is not None)


def _shape(value: ValueInfo) -> tuple[int, ...]:
    return value.shape or ()


def _size(dtype: torch.dtype | None) -> int:
    return 4 if dtype is None else dtype.itemsize

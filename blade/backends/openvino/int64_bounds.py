# SPDX-License-Identifier: Apache-2.0
"""Check that int64 values fit into int32, in which OpenVINO computes them.

    why_not(node)               # None, or the Reason: an op whose results might need more bits
    check_bounds(cluster)       # Refused, if a value of the cluster may need more bits

Indices, masks and positions are int64 in torch, but small. So ops that move, compare, look up or add values
are supported. Bounds of sums follow from ``LIMIT``, which every call checks the caller's int64 values
against.
"""

from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node

from blade.backends.shared.onnx.support import tensors
from blade.core.cluster import Cluster, OpNode
from blade.core.pytree import tensors_in
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused

LIMIT = 2**28
"""Largest magnitude of int64 inputs, and of sizes."""

_LARGEST = 2**31 - 1

_OPS = frozenset(
    """
    add.Scalar add.Tensor alias.default all.default all.dim any.default any.dim arange.default cat.default
    clone.default contiguous.default detach.default embedding.default eq.Scalar eq.Tensor expand.default
    flatten.using_ints full.default gather.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor index.Tensor
    index_select.default le.Scalar le.Tensor lift_fresh.default logical_not.default lt.Scalar lt.Tensor
    masked_fill.Scalar ne.Scalar ne.Tensor new_full.default new_ones.default new_zeros.default ones.default
    ones_like.default permute.default repeat.default reshape.default rsub.Scalar select.int slice.Tensor
    squeeze.dim stack.default sub.Scalar sub.Tensor t.default to.device to.dtype to.dtype_layout to.other
    transpose.int type_as.default unsqueeze.default view.default where.self zeros.default zeros_like.default
    """.split()
)
"""Overloads of ``aten`` that are supported with int64 tensors."""

aten = torch.ops.aten
_SUMS = (
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
)
_VALUES: dict[Any, int] = {
    aten.arange.default: 0,
    aten.full.default: 1,
    aten.new_full.default: 2,
    aten.masked_fill.Scalar: 2,
    **{getattr(aten, name).Scalar: 1 for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""The argument that is a value; other numbers are axes and positions."""


def why_not(node: OpNode, backend: str) -> Reason | None:
    """``None`` if ``node`` has no int64 tensors or its results are bounded."""
    given = list(tensors((*node.args, *node.kwargs.values())))
    made = list(tensors(node.outputs))
    if not any(value.dtype == torch.int64 for value in (*given, *made)):
        return None
    why = ""
    if str(node.target).removeprefix("aten.") not in _OPS:
        why = "its results may need more than the 32 bits that OpenVINO computes int64 with"
    elif any(v.dtype == torch.int64 for v in made) and any(
        v.dtype is not None and v.dtype.is_floating_point for v in given[:1]
    ):
        why = "it makes int64 of floats, which OpenVINO computes in int32"
    if not why:
        return None
    detail = f"{node.target} stays TorchScript: {why}."
    return Reason(Stage.SUPPORT, Code.UNSUPPORTED_DTYPE, backend, node.name, detail)


def check_bounds(cluster: Cluster) -> None:
    """Raise ``Refused`` if an int64 value of ``cluster`` may overflow int32 for inputs within ``LIMIT``."""
    bounds: dict[Node, int] = {}
    for node in cluster.gm.graph.nodes:
        bounds[node] = _bound(cluster, node, bounds)
        if bounds[node] > _LARGEST:
            raise Refused(
                Code.UNSUPPORTED_DTYPE,
                f"{node.target} may have values up to {bounds[node]}; OpenVINO computes int64 in int32.",
            )


def _bound(cluster: Cluster, node: Node, bounds: dict[Node, int]) -> int:
    """A bound of the magnitude of the integers that ``node`` makes or compares; 0 for floats."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return LIMIT
    kinds = {tensor.dtype for tensor in tensors_in(value)}
    if torch.int32 in kinds:
        return _LARGEST  # it wraps around as torch's does
    if torch.int64 in kinds and node.op in ("placeholder", "get_attr"):
        held = node.op == "get_attr"
        return _magnitude(attrgetter(str(node.target))(cluster.gm)) if held else LIMIT
    given = [n for n in node.all_input_nodes if tensors_in(n.meta.get("val"))]
    if torch.int64 not in kinds | {t.dtype for n in given for t in tensors_in(n.meta.get("val"))}:
        return int(torch.bool in kinds)
    if node.target in _SUMS and torch.int64 in kinds:
        left, right, *alpha = (_of(one, bounds) for one in node.args)
        times = _of(node.kwargs.get("alpha", 1), bounds)
        return left + right * (alpha[0] if alpha else times)
    values = [node.args[_VALUES[node.target]]] if node.target in _VALUES else []
    return max([0, *(bounds[one] for one in given), *(_of(one, bounds) for one in values)])


def _of(argument: Any, bounds: dict[Node, int]) -> int:
    if isinstance(argument, Node):
        return bounds[argument]
    return abs(int(argument)) if isinstance(argument, int) else 0


def _magnitude(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    low, high = tensor.detach().aminmax()
    return max(-int(low), int(high))


def is_within(tensor: torch.Tensor) -> bool:
    """Whether all of an int64 ``tensor`` is within ``LIMIT``."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return int(low) >= -LIMIT and int(high) <= LIMIT

# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes, sums along an axis, and what sorts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blade.importers.onnx.emit.dtypes import WIDE_UNSIGNED
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value
from blade.importers.onnx.ops.pointwise import wide

_REDUCTIONS = {
    "ReduceSum": "torch.sum({x}, {axes}, {keep}, dtype={dtype})",
    "ReduceMean": "torch.mean({x}, {axes}, {keep})",
    "ReduceMax": "torch.amax({x}, {axes}, {keep})",
    "ReduceMin": "torch.amin({x}, {axes}, {keep})",
    "ReduceL1": "torch.sum(torch.abs({x}), {axes}, {keep}, dtype={dtype})",
    "ReduceL2": "torch.sqrt(torch.sum({x} * {x}, {axes}, {keep}))",
    "ReduceSumSquare": "torch.sum({x} * {x}, {axes}, {keep}, dtype={dtype})",
    "ReduceLogSum": "torch.log(torch.sum({x}, {axes}, {keep}))",
    "ReduceLogSumExp": "torch.logsumexp({x}, {axes}, {keep})",
}
_SINGLE = {
    "ReduceL1": "torch.abs({x})",
    "ReduceL2": "torch.abs({x})",
    "ReduceSumSquare": "{x} * {x}",
    "ReduceLogSum": "torch.log({x})",
}
"""What is left of a reduction over no axes."""
_INEXACT = ("ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


@row(*_REDUCTIONS, "ReduceProd")
def reduction(e: Emitter, node: NodeView, x: Value, axes: Value | None = None) -> TensorValue:
    dtype, keep = e.dtype(x), bool(node.int("keepdims", 1))
    text = wide(e, node, x)
    is_empty = axes is not None and e.dims(axes) == (0,)
    named = node.ints("axes") if axes is None else e.known_ints(axes)
    if (is_empty or (axes is None and not named)) and node.int("noop_with_empty_axes", 0):
        return TensorValue(_SINGLE.get(node.op, "{x}").format(x=text), dtype, e.dims(x))
    known: Sequence[int] | None = named
    if is_empty or (axes is None and not named):
        known = range(e.rank(x))
    if node.op in _INEXACT and not dtype.is_floating_point:
        text = f"{text}.to(torch.float32)"
    if node.op == "ReduceProd":
        made = _product(e, text, dtype, known, axes, keep)
    elif known is not None and not known:  # a number
        made = _SINGLE.get(node.op, "{x}").format(x=text)
    else:
        made = _reduced(e, node, x, text, dtype, known, axes, keep)
    if (node.op in _INEXACT and not dtype.is_floating_point) or dtype in WIDE_UNSIGNED:
        made = f"({made}).to({dtype})"
    return TensorValue(made, dtype, _dims(e, x, known, keep))


def _reduced(
    e: Emitter,
    node: NodeView,
    x: Value,
    text: str,
    dtype: torch.dtype,
    known: Sequence[int] | None,
    axes: Value | None,
    keep: bool,
) -> str:
    over = e.ints(list(known)) if known is not None else e.ints(axes)
    sizes = e.dims(x) or ()
    of_nothing = known is not None and any(sizes[axis] == 0 for axis in known if sizes)
    if of_nothing and known is not None and node.op in ("ReduceMax", "ReduceMin"):
        return _of_nothing(e, node, x, dtype, known, keep)
    if node.op in ("ReduceMax", "ReduceMin") and 0 in sizes and dtype.is_floating_point:
        least = '-float("inf")' if node.op == "ReduceMax" else 'float("inf")'
        return f"run.{node.op[6:].lower().replace('m', 'am', 1)}({text}, {over}, {keep}, {least})"
    if node.op in ("ReduceMax", "ReduceMin") and 0 in sizes and dtype is torch.bool:
        least = "0.0" if node.op == "ReduceMax" else "1.0"
        name = "amax" if node.op == "ReduceMax" else "amin"
        return f"run.{name}({text}.to(torch.float32), {over}, {keep}, {least}).to(torch.bool)"
    summed = torch.int64 if dtype in WIDE_UNSIGNED else dtype
    return _REDUCTIONS[node.op].format(x=text, axes=over, keep=keep, dtype=summed)


def _of_nothing(
    e: Emitter, node: NodeView, x: Value, dtype: torch.dtype, known: Sequence[int], keep: bool
) -> str:
    """The largest or smallest of no elements."""
    if dtype.is_floating_point:
        least = 'float("inf")'
        fill = least if node.op == "ReduceMin" else f"-{least}"
    elif dtype is torch.bool:
        fill = str(node.op == "ReduceMin")
    else:
        info = torch.iinfo(dtype)
        fill = str(info.max if node.op == "ReduceMin" else info.min)
    kept = _dims(e, x, known, True) or ()
    gone = {axis % e.rank(x) for axis in known}
    sizes = [e.size(x, k) if k not in gone else 1 for k in range(len(kept))]
    if not keep:
        sizes = [one for k, one in enumerate(sizes) if k not in gone]
    return f"torch.full({e.ints(sizes)}, {fill}, dtype={dtype}, device={e.tensor(x)}.device)"


def _product(
    e: Emitter,
    text: str,
    dtype: torch.dtype,
    known: Sequence[int] | None,
    axes: Value | None,
    keep: bool,
) -> str:
    """torch multiplies along one axis at a time."""
    if known is None:
        assert axes is not None
        return f"run.product({text}, {e.ints(axes)}, {keep})"
    if any(axis < 0 for axis in known) and any(axis >= 0 for axis in known):
        raise NotImported("Axes are counted from both ends.")
    # From the back, so that the axes before keep their number.
    for axis in sorted(known, reverse=min(known, default=0) >= 0):
        text = f"torch.prod({text}, {axis}, {keep}, dtype={dtype})"
    return text


def _dims(
    e: Emitter, x: Value, known: Sequence[int] | None, keep: bool
) -> tuple[int | None, ...] | None:
    dims = e.dims(x)
    if dims is None or known is None:
        return None
    gone = {axis % len(dims) for axis in known} if dims else set()
    if keep:
        return tuple(1 if k in gone else d for k, d in enumerate(dims))
    return tuple(d for k, d in enumerate(dims) if k not in gone)


@row("ArgMax", "ArgMin")
def arg_extreme(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    name, axis = node.op.lower(), node.int("axis", 0)
    keep, text = bool(node.int("keepdims", 1)), wide(e, node, x)
    if node.int("select_last_index", 0):
        made = f"{e.size(x, axis)} - 1 - torch.{name}({text}.flip([{axis}]), {axis}, {keep})"
    else:
        made = f"torch.{name}({text}, {axis}, {keep})"
    return TensorValue(made, torch.int64, _dims(e, x, [axis], keep))


@row("CumSum", "CumProd")
def cumulative(e: Emitter, node: NodeView, x: Value, axis: Value) -> TensorValue:
    name, along, dtype = node.op.lower(), e.int(axis), e.dtype(x)
    text = wide(e, node, x)
    if node.int("exclusive", 0):
        back = bool(node.int("reverse", 0))
        fill = 1 if node.op == "CumProd" else 0
        made = f"run.exclusive_{name}({text}, {along}, {back}, {fill})"
    elif node.int("reverse", 0):
        made = f"torch.{name}({text}.flip([{along}]), {along}).flip([{along}])"
    else:
        made = f"torch.{name}({text}, {along})"
    return TensorValue(made if dtype.is_floating_point else f"{made}.to({dtype})", dtype, e.dims(x))


@row("TopK")
def top_k(e: Emitter, node: NodeView, x: Value, k: Value) -> tuple[TensorValue, TensorValue]:
    """The smaller index of equal elements comes first, which ``torch.topk`` does not promise."""
    axis, dtype = node.int("axis", -1), e.dtype(x)
    largest = bool(node.int("largest", 1))
    count = e.int(k)
    values, indices = e.name("values"), e.name("indices")
    text = wide(e, node, x)
    e.line(
        f"{values}, {indices} = torch.sort({text}, stable=True, dim={axis}, descending={largest})"
    )
    dims = e.dims(x)
    if dims is not None:
        size = int(count) if count.isdigit() else None
        dims = tuple(size if n == axis % len(dims) else d for n, d in enumerate(dims))
    first = f"{values}.narrow({axis}, 0, {count})"
    first = f"{first}.to({dtype})" if dtype in WIDE_UNSIGNED else first
    return (
        TensorValue(first, dtype, dims),
        TensorValue(f"{indices}.narrow({axis}, 0, {count})", torch.int64, dims),
    )


@row("Unique")
def unique(e: Emitter, node: NodeView, x: Value) -> tuple[TensorValue, ...]:
    axis = node.attributes.get("axis")
    names = [e.name(one) for one in ("unique", "first", "inverse", "counts")]
    ordered = bool(node.int("sorted", 1))
    text = e.tensor(x)
    if axis is None:
        e.line(f"{', '.join(names)} = run.unique({text}.reshape(-1), 0, {ordered})")
    else:
        e.line(f"{', '.join(names)} = run.unique({text}, {int(axis)}, {ordered})")
    dims = (None,) if axis is None else None
    made = [TensorValue(names[0], e.dtype(x), dims)]
    made += [TensorValue(one, torch.int64, (None,)) for one in names[1:]]
    return tuple(made[: len(node.outputs)])

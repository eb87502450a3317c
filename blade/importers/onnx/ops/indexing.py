# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, and what selects elements by value."""

from __future__ import annotations

import numpy as np
import torch

from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


def long(e: Emitter, value: Value) -> str:
    """Indices as int64."""
    text = e.tensor(value)
    return text if e.dtype(value) is torch.int64 else f"{text}.to(torch.int64)"


@row("Gather")
def gather(e: Emitter, node: NodeView, x: Value, indices: Value) -> TensorValue:
    axis, dims, index_dims = node.int("axis", 0), e.sizes(x), e.sizes(indices)
    own = None
    if dims is not None:
        axis %= len(dims)
        if index_dims is not None:
            own = (*dims[:axis], *index_dims, *dims[axis + 1 :])
    elif axis < 0:
        raise NotImported("The rank of an input is not known.")
    if index_dims == () and e.host(indices) is not None:
        return TensorValue(f"{e.tensor(x)}.select({axis}, {e.int(indices)})", e.dtype(x), own)
    colons = ":, " * axis
    return TensorValue(f"{e.tensor(x)}[{colons}{long(e, indices)}]", e.dtype(x), own)


def _counted_from_front(e: Emitter, x: Value, indices: Value, axis: int) -> str:
    """Indices along ``axis`` without negative ones."""
    known = e.known(indices)
    if known is not None and np.all(known >= 0):
        return long(e, indices)
    size = e.size(x, axis)
    text = long(e, indices)
    return f"torch.where({text} < 0, {text} + {size}, {text})"


@row("GatherElements")
def gather_elements(e: Emitter, node: NodeView, x: Value, indices: Value) -> TensorValue:
    axis = node.int("axis", 0)
    at = _counted_from_front(e, x, indices, axis)
    return TensorValue(f"torch.gather({e.tensor(x)}, {axis}, {at})", e.dtype(x), e.dims(indices))


@row("GatherND")
def gather_nd(e: Emitter, node: NodeView, x: Value, indices: Value) -> TensorValue:
    batch = node.int("batch_dims", 0)
    places, sizes = e.sizes(indices), e.sizes(x)
    if places is not None and sizes is not None and isinstance(places[-1], int):
        text = long(e, indices)
        rank = len(places) - 1
        at = []
        for k in range(batch):
            shape = ["1"] * rank
            shape[k] = "-1"
            count = f"torch.arange({e.size(x, k)}, device={text}.device)"
            at.append(f"{count}.reshape([{', '.join(shape)}])" if rank else count)
        at += [f"{text}.select(-1, {k})" for k in range(places[-1])]
        own = (*places[:-1], *sizes[batch + places[-1] :])
        return TensorValue(f"{e.tensor(x)}[{', '.join(at)}]", e.dtype(x), own)
    return TensorValue(f"run.gather_nd({e.tensor(x)}, {long(e, indices)}, {batch})", e.dtype(x))


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@row("ScatterElements", "Scatter")
def scatter_elements(
    e: Emitter, node: NodeView, x: Value, indices: Value, updates: Value
) -> TensorValue:
    axis, how = node.int("axis", 0), node.text("reduction", "none")
    at = _counted_from_front(e, x, indices, axis)
    if how == "none":
        made = f"torch.scatter({e.tensor(x)}, {axis}, {at}, {e.tensor(updates)})"
    elif how in _REDUCE:
        given = f"{e.tensor(x)}, {axis}, {at}, {e.tensor(updates)}"
        made = f'torch.scatter_reduce({given}, "{_REDUCE[how]}")'
    else:
        raise NotImported(f"The reduction {how!r}.")
    return TensorValue(made, e.dtype(x), e.dims(x))


@row("ScatterND")
def scatter_nd(e: Emitter, node: NodeView, x: Value, indices: Value, updates: Value) -> TensorValue:
    how = node.text("reduction", "none")
    if how != "none" and how not in _REDUCE:
        raise NotImported(f"The reduction {how!r}.")
    given = f"{e.tensor(x)}, {long(e, indices)}, {e.tensor(updates)}"
    return TensorValue(
        f'run.scatter_nd({given}, "{_REDUCE.get(how, "none")}")', e.dtype(x), e.dims(x)
    )


@row("TensorScatter")
def tensor_scatter(
    e: Emitter, node: NodeView, past: Value, update: Value, write: Value | None = None
) -> TensorValue:
    axis = node.int("axis", -2) % e.rank(past)
    wraps = node.text("mode", "linear") == "circular"
    start = "None" if write is None else long(e, write)
    given = f"{e.tensor(past)}, {e.tensor(update)}, {start}, {axis}, {wraps}"
    return TensorValue(f"run.tensor_scatter({given})", e.dtype(past), e.dims(past))


@row("OneHot")
def one_hot(e: Emitter, node: NodeView, indices: Value, depth: Value, values: Value) -> TensorValue:
    axis, rank = node.int("axis", -1), e.rank(indices)
    count, dtype = e.int(depth), e.dtype(values)
    pair = e.tensor(values)
    made = f"run.one_hot({long(e, indices)}, {count}, {pair}, {axis % (rank + 1)})"
    dims = list(e.dims(indices) or ())
    dims.insert(axis % (rank + 1), int(count) if count.isdigit() else None)
    return TensorValue(made, dtype, tuple(dims))


@row("NonZero")
def non_zero(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    dims = e.dims(x)
    own = (None, None) if dims is None else (max(len(dims), 1), None)
    text = e.tensor(x) if dims != () else f"{e.tensor(x)}.reshape(1)"
    return TensorValue(f"torch.nonzero({text}).t()", torch.int64, own)


@row("Compress")
def compress(e: Emitter, node: NodeView, x: Value, condition: Value) -> TensorValue:
    axis = node.attributes.get("axis")
    text, at = e.tensor(x), f"torch.nonzero({e.tensor(condition)}).reshape(-1)"
    if axis is None:
        return TensorValue(f"{text}.reshape(-1).index_select(0, {at})", e.dtype(x), (None,))
    dims = e.dims(x)
    own = None
    if dims is not None:
        own = tuple(None if k == int(axis) % len(dims) else d for k, d in enumerate(dims))
    return TensorValue(f"{text}.index_select({int(axis)}, {at})", e.dtype(x), own)


@row("EmbedLayerNormalization", domain="com.microsoft")
def embed_layer_normalization(
    e: Emitter,
    node: NodeView,
    ids: Value,
    segments: Value | None,
    words: Value,
    positions: Value,
    kinds: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    position_ids: Value | None = None,
) -> tuple[TensorValue, ...]:
    if node.int("mask_index_type", 0) and node.wants(1) and mask is not None:
        raise NotImported("The mask index is an output.")
    length = e.size(ids, 1)
    text = f"{e.tensor(words)}[{long(e, ids)}]"
    if position_ids is None:
        text += f" + {e.tensor(positions)}.narrow(0, 0, {length})"
    else:
        text += f" + {e.tensor(positions)}[{long(e, position_ids)}]"
    if segments is not None and kinds is not None:
        text += f" + {e.tensor(kinds)}[{long(e, segments)}]"
    dims = (*(e.dims(ids) or (None, None)), (e.dims(words) or (None, None))[1])
    total = e.let(text, e.dtype(words), dims, "embedded")
    eps = node.float("epsilon", 1e-12)
    given = f"{e.ints([e.size(words, 1)])}, {e.tensor(gamma)}, {e.tensor(beta)}, {eps!r}"
    made = TensorValue(f"torch.layer_norm({total.text}, {given})", total.dtype, dims)
    device = f"{total.text}.device"
    if mask is None:
        text = f"torch.zeros([{e.size(ids, 0)}], dtype=torch.int32, device={device})"
    else:
        text = f"torch.sum({e.tensor(mask)}, [1], dtype=torch.int32)"
    index = TensorValue(text, torch.int32, (None,))
    return (made, index, total)[: len(node.outputs)]

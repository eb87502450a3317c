# SPDX-License-Identifier: Apache-2.0
"""Shapes, and what moves elements without computing with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blade.importers.onnx.emit import host_numbers as on
from blade.importers.onnx.emit.dtypes import to_tensor, torch_dtype
from blade.importers.onnx.emit.emitter import HOST_ELEMENTS, Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import (
    ConstantValue,
    Dims,
    HostNumber,
    HostValue,
    Number,
    OptionalValue,
    SequenceValue,
    Sizes,
    TensorValue,
    Value,
)

_END = 2**62


def host(numbers: Sequence[HostNumber] | HostNumber, dtype: torch.dtype = torch.int64) -> HostValue:
    """A tensor of numbers that the host knows."""
    array = np.empty((len(numbers),) if isinstance(numbers, list) else (), dtype=object)
    array[...] = numbers
    return HostValue(array, dtype)


def numbers(e: Emitter, value: Value | None) -> list[HostNumber] | None:
    """The elements of a vector of known length, or ``None``."""
    array = e.host(value)
    if array is not None:
        return [one if isinstance(one, Number) else int(one) for one in array.flat]
    dims = None if value is None else e.dims(value)
    if value is None or dims is None or len(dims) != 1 or dims[0] is None:
        return None
    found = e.ints(value)
    return [Number(f"{found}[{k}]") for k in range(dims[0])]


def _known_dims(sizes: Sequence[HostNumber]) -> Sizes:
    return tuple(one if is_size(one) else None for one in sizes)  # type: ignore[misc]


def is_size(number: HostNumber) -> bool:
    """Whether ``number`` is the size of an axis, not -1 or what may be negative."""
    return number.is_size if isinstance(number, Number) else number >= 0


@row("Constant")
def constant(e: Emitter, node: NodeView) -> Value:
    for name, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if name in node.attributes:
            array = np.array(node.attributes[name], dtype)
            kind = torch.float32 if dtype is np.float32 else torch.int64
            return ConstantValue(node.outputs[0], array, kind)
    proto, held = node.attributes.get("value"), node.array("value")
    if proto is None or held is None:
        raise NotImported("A constant of strings, or a sparse one.")
    return ConstantValue(node.outputs[0], held, torch_dtype(proto.data_type))


@row("Identity", "Dropout")
def identity(e: Emitter, node: NodeView, x: Value, *unused: Value) -> Any:
    """Dropout does nothing in inference; its mask says that every element is kept."""
    if node.op == "Dropout" and len(unused) > 1 and unused[1] is not None:
        training = e.known(unused[1])
        ratio = None if unused[0] is None else e.known(unused[0])
        if (training is None or bool(training)) and (ratio is None or float(ratio) > 0):
            raise NotImported("Dropout in training mode.")
    if not node.wants(1):
        return x
    return x, TensorValue(f"torch.ones_like({e.tensor(x)}, dtype=torch.bool)", torch.bool)


@row("Shape")
def shape(e: Emitter, node: NodeView, x: Value) -> Value:
    dims = e.dims(x)
    if dims is None:
        if "start" in node.attributes or "end" in node.attributes:
            raise NotImported("The rank of an input is not known.")
        return TensorValue(f"torch._shape_as_tensor({e.tensor(x)})", torch.int64, (None,))
    rank = len(dims)
    start, end, _ = slice(node.int("start", 0), node.attributes.get("end")).indices(rank)
    return host([e.size(x, k) for k in range(start, end)])


@row("Size")
def size(e: Emitter, node: NodeView, x: Value) -> Value:
    dims = e.dims(x)
    if dims is None:
        return host(e.number(f"{e.tensor(x)}.numel()", is_size=True))
    count: HostNumber = 1
    for k in range(len(dims)):
        count = on.mul(e, count, e.size(x, k))
    return host(count)


@row("Reshape")
def reshape(e: Emitter, node: NodeView, x: Value, shape: Value) -> TensorValue:
    sizes, zero = numbers(e, shape), bool(node.int("allowzero", 0))
    dtype = e.dtype(x)
    if e.host(shape) is None or sizes is None:
        made = f"run.reshape({e.tensor(x)}, {e.ints(shape)}, {zero})"
        return TensorValue(made, dtype, None if sizes is None else (None,) * len(sizes))
    if not zero:
        sizes = [e.size(x, k) if one == 0 else one for k, one in enumerate(sizes)]
    return TensorValue(f"{e.tensor(x)}.reshape({e.ints(sizes)})", dtype, _known_dims(sizes))


@row("Flatten")
def flatten(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    rank = e.rank(x)
    axis = node.int("axis", 1)
    axis = axis + rank if axis < 0 else axis
    parts: list[HostNumber] = []
    for group in (range(axis), range(axis, rank)):
        count: HostNumber = 1
        for k in group:
            count = on.mul(e, count, e.size(x, k))
        parts.append(count)
    return TensorValue(f"{e.tensor(x)}.reshape({e.ints(parts)})", e.dtype(x), _known_dims(parts))


@row("Unsqueeze")
def unsqueeze(e: Emitter, node: NodeView, x: Value, axes: Value | None = None) -> TensorValue:
    known = node.ints("axes") if axes is None else e.known_ints(axes)
    dims = e.sizes(x)
    if known is None or dims is None:
        return TensorValue(f"run.unsqueeze({e.tensor(x)}, {e.ints(axes)})", e.dtype(x))
    rank = len(dims) + len(known)
    made, sizes = e.tensor(x), list(dims)
    for axis in sorted(one % rank for one in known):
        made = f"{made}.unsqueeze({axis})"
        sizes.insert(axis, 1)
    return TensorValue(made, e.dtype(x), tuple(sizes))


@row("Squeeze")
def squeeze(e: Emitter, node: NodeView, x: Value, axes: Value | None = None) -> TensorValue:
    known = node.ints("axes") if axes is None else e.known_ints(axes)
    dims = e.sizes(x)
    if axes is None and known is None:
        is_fixed = dims is not None and all(isinstance(d, int) for d in dims)
        left = tuple(d for d in dims or () if d != 1) if is_fixed else None
        return TensorValue(f"torch.squeeze({e.tensor(x)})", e.dtype(x), left)
    if known is None or dims is None:
        return TensorValue(f"run.squeeze({e.tensor(x)}, {e.ints(axes)})", e.dtype(x))
    gone = sorted((one % len(dims) for one in known), reverse=True)
    made = e.tensor(x)
    for axis in gone:
        made = f"{made}.squeeze({axis})"
    return TensorValue(made, e.dtype(x), tuple(d for k, d in enumerate(dims) if k not in gone))


@row("Transpose")
def transpose(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    order = node.ints("perm") or list(range(e.rank(x)))[::-1]
    dims = e.sizes(x)
    moved = None if dims is None else tuple(dims[k] for k in order)
    if len(order) < 2:
        return TensorValue(e.tensor(x), e.dtype(x), dims)
    return TensorValue(f"{e.tensor(x)}.permute({order})", e.dtype(x), moved)


@row("Concat")
def concat(e: Emitter, node: NodeView, *values: Value) -> TensorValue:
    axis = node.int("axis", 0)
    given = ", ".join(e.tensor(one) for one in values)
    found = [e.sizes(one) for one in values]
    dims: Sizes | None = None
    if all(one is not None for one in found):
        columns = list(zip(*(one for one in found if one is not None)))
        along = [one for one in columns[axis] if isinstance(one, int)]
        common: list[int | Number | None] = [
            next((d for d in sizes if d is not None), None) for sizes in columns
        ]
        common[axis] = sum(along) if len(along) == len(values) else None
        dims = tuple(common)
    return TensorValue(f"torch.cat([{given}], {axis})", e.dtype(values[0]), dims)


@row("Split")
def split(e: Emitter, node: NodeView, x: Value, sizes: Value | None = None) -> tuple[Value, ...]:
    axis, count = node.int("axis", 0), len(node.outputs)
    given = node.ints("split") if sizes is None else numbers(e, sizes)
    parts: Sequence[HostNumber]
    if given is None:
        total = e.size(x, axis)
        chunk = on.div(e, on.add(e, total, count - 1), count)
        last = on.sub(e, total, on.mul(e, chunk, count - 1))
        parts = [chunk] * (count - 1) + [last]
    else:
        parts = given
    names = [e.name(one or "part") for one in node.outputs]
    left = ", ".join(names)
    made = f"torch.split({e.tensor(x)}, {e.ints(list(parts))}, {axis})"
    e.line(f"{left} = {made}" if count > 1 else f"{left} = {made}[0]")
    dims = e.sizes(x)
    results: list[Value] = []
    for name, part in zip(names, parts):
        own = None
        if dims is not None:
            at = axis % len(dims)
            own = (*dims[:at], *_known_dims([part]), *dims[at + 1 :])
        results.append(TensorValue(name, e.dtype(x), own))
    return tuple(results)


@row("Slice")
def slice_(
    e: Emitter,
    node: NodeView,
    x: Value,
    starts: Value | None = None,
    ends: Value | None = None,
    axes: Value | None = None,
    steps: Value | None = None,
) -> TensorValue:
    first: Any = node.ints("starts") if starts is None else numbers(e, starts)
    last: Any = node.ints("ends") if ends is None else numbers(e, ends)
    along: Any = node.ints("axes") if axes is None else numbers(e, axes)
    step: Any = [1] * len(first or ()) if steps is None else numbers(e, steps)
    if None in (first, last, step) or (axes is not None and along is None):
        given = [e.no_ints() if one is None else e.ints(one) for one in (starts, ends, axes, steps)]
        made = f"run.slice_axes({e.tensor(x)}, {', '.join(given)})"
        return TensorValue(made, e.dtype(x), (None,) * e.rank(x))
    made, dims = e.tensor(x), e.sizes(x)
    sizes = None if dims is None else list(dims)
    for axis, start, end, by in zip(along or range(len(first)), first, last, step):
        made = _cut(e, made, axis, start, end, by)
        if sizes is not None and isinstance(axis, int):
            sizes[axis] = _cut_size(sizes[axis], start, end, by)
        else:
            sizes = None
    rank_only = None if dims is None else (None,) * len(dims)
    return TensorValue(made, e.dtype(x), rank_only if sizes is None else tuple(sizes))


def _cut(e: Emitter, text: str, axis: HostNumber, start: Any, end: Any, step: HostNumber) -> str:
    if isinstance(start, int) and isinstance(end, int) and (start, step) == (0, 1) and end > _END:
        return text
    if isinstance(step, int) and step > 0:
        return f"torch.ops.aten.slice({text}, {axis}, {start}, {end}, {step})"
    return f"run.slice({text}, {axis}, {start}, {end}, {step})"


def _cut_size(size: Any, start: Any, end: Any, step: Any) -> int | Number | None:
    if all(isinstance(one, int) for one in (size, start, end, step)):
        if step < 0 and end < -(size or 0):
            end = None
        return len(range(size or 0)[slice(start, end, step)])
    whole = isinstance(start, int) and isinstance(end, int) and start == 0 and step == 1
    return size if whole and end > _END else None


@row("Tile")
def tile(e: Emitter, node: NodeView, x: Value, repeats: Value) -> TensorValue:
    counts, dims = numbers(e, repeats), e.dims(x)
    own: Dims | None = None if dims is None else (None,) * len(dims)
    if dims is not None and counts is not None:
        own = tuple(
            d * c if isinstance(d, int) and isinstance(c, int) else d if c == 1 else None
            for d, c in zip(dims, counts)
        )
    return TensorValue(f"{e.tensor(x)}.repeat({e.ints(repeats)})", e.dtype(x), own)


@row("Expand")
def expand(e: Emitter, node: NodeView, x: Value, shape: Value) -> TensorValue:
    sizes, dims = numbers(e, shape), e.dims(x)
    if sizes is None or dims is None or e.host(shape) is None:
        rank = None if sizes is None or dims is None else max(len(sizes), len(dims))
        own = None if rank is None else (None,) * rank
        return TensorValue(f"run.expand({e.tensor(x)}, {e.ints(shape)})", e.dtype(x), own)
    rank = max(len(sizes), len(dims))
    wanted = [1] * (rank - len(sizes)) + sizes
    have = (1,) * (rank - len(dims)) + (e.sizes(x) or ())
    pairs = [_expanded(e, one, size) for one, size in zip(have, wanted)]
    if all(entry == -1 for entry, _ in pairs) and rank == len(dims):
        return TensorValue(e.tensor(x), e.dtype(x), e.sizes(x))
    entries = [entry for entry, _ in pairs]
    own_sizes = tuple(size for _, size in pairs)
    return TensorValue(f"{e.tensor(x)}.expand({e.ints(entries)})", e.dtype(x), own_sizes)


def _expanded(
    e: Emitter, have: int | Number | None, wanted: HostNumber
) -> tuple[HostNumber, int | Number | None]:
    """What ``expand`` takes for an axis of size ``have``, -1 for as it is, and the size that it gets."""
    if wanted == 1 or have == wanted:
        return -1, have
    if have == 1:
        return wanted, wanted if is_size(wanted) else None  # type: ignore[return-value]
    if isinstance(have, int):
        return -1, have
    if isinstance(wanted, Number):
        return e.number(f"{wanted} - 2 * int({wanted} == 1)"), None
    return wanted, wanted  # type: ignore[return-value]


@row("ConstantOfShape")
def constant_of_shape(e: Emitter, node: NodeView, shape: Value) -> Value:
    value, proto = node.array("value"), node.attributes.get("value")
    dtype = torch.float32 if proto is None else torch_dtype(proto.data_type)
    fill = 0.0 if value is None else to_tensor(value, dtype).item()
    sizes = numbers(e, shape)
    known = e.known_ints(shape)
    is_host = known is not None and dtype in (torch.int64, torch.int32, torch.bool)
    if is_host and int(np.prod(known or [1])) <= HOST_ELEMENTS:
        array = np.empty(known or (), dtype=object)
        array[...] = fill
        return HostValue(array, dtype)
    text = number_text(fill)
    device = f", device={e.anchor}.device" if e.anchor else ""
    made = f"torch.full({e.ints(shape)}, {text}, dtype={dtype}{device})"
    return TensorValue(made, dtype, None if sizes is None else _known_dims(sizes))


@row("Range")
def range_(e: Emitter, node: NodeView, start: Value, limit: Value, delta: Value) -> TensorValue:
    dtype = e.dtype(start)
    whole = not dtype.is_floating_point
    number = e.int if whole else e.float
    first, last, step = number(start), number(limit), number(delta)
    device = f", device={e.anchor}.device" if e.anchor else ""
    if whole and (first, step) == ("0", "1"):
        count = numbers(e, limit) if e.host(limit) is not None else None
        sizes = _known_dims(count) if count is not None else (None,)
        return TensorValue(f"torch.arange({last}, dtype={dtype}{device})", dtype, sizes)
    made = f"run.arange({first}, {last}, {step})" if whole else ""
    if not whole:
        made = f"run.arange_float({first}, {last}, {step})"
    moved = f", {e.anchor}.device" if e.anchor else ""
    text = f"{made}.to({e.anchor}.device, {dtype})" if moved else f"{made}.to({dtype})"
    return TensorValue(text, dtype, (None,))


@row("EyeLike")
def eye_like(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    dtype = torch_dtype(node.int("dtype", 0)) if "dtype" in node.attributes else e.dtype(x)
    rows, columns = e.size(x, 0), e.size(x, 1)
    k = node.int("k", 0)
    made = f"run.eye({rows}, {columns}, {k}, {e.tensor(x)})"
    return TensorValue(f"{made}.to({dtype})", dtype, e.dims(x))


@row("Trilu")
def trilu(e: Emitter, node: NodeView, x: Value, k: Value | None = None) -> TensorValue:
    name = "triu" if node.int("upper", 1) else "tril"
    diagonal = "0" if k is None else e.int(k)
    return TensorValue(f"torch.{name}({e.tensor(x)}, {diagonal})", e.dtype(x), e.dims(x))


@row("DepthToSpace", "SpaceToDepth")
def depth_and_space(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    block = node.int("blocksize", 1)
    n, c, h, w = (e.size(x, k) for k in range(4))
    if node.op == "SpaceToDepth":
        sizes: list[HostNumber] = [n, c, on.div(e, h, block), block, on.div(e, w, block), block]
        is_crd = node.text("mode", "DCR") == "CRD"
        order = [0, 1, 3, 5, 2, 4] if is_crd else [0, 3, 5, 1, 2, 4]
        final = [n, on.mul(e, c, block * block), sizes[2], sizes[4]]
    else:
        rest = on.div(e, c, block * block)
        is_crd = node.text("mode", "DCR") == "CRD"
        sizes = [n, rest, block, block, h, w] if is_crd else [n, block, block, rest, h, w]
        order = [0, 1, 4, 2, 5, 3] if is_crd else [0, 3, 4, 1, 5, 2]
        final = [n, rest, on.mul(e, h, block), on.mul(e, w, block)]
    made = f"{e.tensor(x)}.reshape({e.ints(sizes)}).permute({order}).reshape({e.ints(final)})"
    return TensorValue(made, e.dtype(x), _known_dims(final))


@row("Pad")
def pad(
    e: Emitter,
    node: NodeView,
    x: Value,
    pads: Value | None = None,
    fill: Value | None = None,
    axes: Value | None = None,
) -> TensorValue:
    rank, mode = e.rank(x), node.text("mode", "constant")
    amounts: Any = node.ints("pads") if pads is None else numbers(e, pads)
    along: Any = list(range(rank)) if axes is None else e.known_ints(axes)
    if amounts is None or along is None:
        made = _pad_at_run_time(e, node, x, pads, fill, axes)
        return TensorValue(made, e.dtype(x), (None,) * rank)
    before: list[HostNumber] = [0] * rank
    after: list[HostNumber] = [0] * rank
    for k, axis in enumerate(along):
        before[axis], after[axis] = amounts[k], amounts[k + len(along)]
    dims = _padded_dims(e.dims(x) or (), before, after)
    text, dtype = e.tensor(x), e.dtype(x)
    if mode == "constant":
        flat = [one for pair in reversed(list(zip(before, after))) for one in pair]
        while len(flat) > 2 and flat[-1] == 0 and flat[-2] == 0:
            flat = flat[:-2]
        value = "0" if fill is None else _fill(e, fill)
        return TensorValue(f"torch.constant_pad_nd({text}, {e.ints(flat)}, {value})", dtype, dims)
    for axis, (left, right) in enumerate(zip(before, after)):
        if left != 0 or right != 0:
            text = f'run.pad({text}, {axis}, {left}, {right}, "{mode}")'
    return TensorValue(text, dtype, dims)


def _fill(e: Emitter, fill: Value) -> str:
    number = e.literal(fill)
    return f"{e.tensor(fill)}.item()" if number is None else number


def _pad_at_run_time(
    e: Emitter, node: NodeView, x: Value, pads: Value | None, fill: Value | None, axes: Value | None
) -> str:
    along = e.no_ints() if axes is None else e.ints(axes)
    mode = node.text("mode", "constant")
    value = "0.0" if fill is None else f"float({_fill(e, fill)})"
    return f'run.pad_axes({e.tensor(x)}, {e.ints(pads)}, {along}, "{mode}", {value})'


def _padded_dims(
    dims: Dims, before: Sequence[HostNumber], after: Sequence[HostNumber]
) -> tuple[int | None, ...]:
    made: list[int | None] = []
    for size, left, right in zip(dims, before, after):
        if size is not None and isinstance(left, int) and isinstance(right, int):
            made.append(size + left + right)
        else:
            made.append(size if left == 0 and right == 0 else None)
    return tuple(made)


@row("CenterCropPad")
def center_crop_pad(e: Emitter, node: NodeView, x: Value, shape: Value) -> TensorValue:
    sizes, axes = numbers(e, shape), node.ints("axes") or list(range(e.rank(x)))
    if sizes is None:
        raise NotImported("The number of axes is not known.")
    made = e.tensor(x)
    for axis, wanted in zip(axes, sizes):
        made = f"run.center({made}, {axis}, {wanted})"
    return TensorValue(made, e.dtype(x), (None,) * e.rank(x))


@row("ReverseSequence")
def reverse_sequence(e: Emitter, node: NodeView, x: Value, lengths: Value) -> TensorValue:
    batch, time = node.int("batch_axis", 1), node.int("time_axis", 0)
    made = f"run.reverse_sequence({e.tensor(x)}, {e.tensor(lengths)}, {batch}, {time})"
    return TensorValue(made, e.dtype(x), e.dims(x))


@row("SequenceConstruct")
def sequence_construct(e: Emitter, node: NodeView, *values: Value) -> SequenceValue:
    given = ", ".join(e.tensor(one) for one in values)
    text = e.assign(f"[{given}]", "List[Tensor]", node.outputs[0])
    dims = [e.dims(one) for one in values]
    rank = {None if one is None else len(one) for one in dims}
    same = rank.pop() if len(rank) == 1 else None
    return SequenceValue(text, e.dtype(values[0]), None if same is None else (None,) * same)


@row("SequenceEmpty")
def sequence_empty(e: Emitter, node: NodeView) -> SequenceValue:
    dtype = torch_dtype(node.int("dtype", 1))
    return SequenceValue(e.assign("[]", "List[Tensor]", node.outputs[0]), dtype)


def _opened(e: Emitter, value: Value) -> SequenceValue:
    found = e.opened(value) if isinstance(value, OptionalValue) else value
    if not isinstance(found, SequenceValue):
        raise NotImported("A sequence is expected where there is none.")
    return found


@row("SequenceAt")
def sequence_at(e: Emitter, node: NodeView, items: Value, at: Value) -> TensorValue:
    found = _opened(e, items)
    return TensorValue(f"{found.text}[{e.int(at)}]", found.dtype, found.dims)


@row("SequenceInsert")
def sequence_insert(
    e: Emitter, node: NodeView, items: Value, one: Value, at: Value | None = None
) -> SequenceValue:
    found = _opened(e, items)
    place = f"len({found.text})" if at is None else e.int(at)
    made = f"run.inserted({found.text}, {e.tensor(one)}, {place})"
    dims = e.dims(one)
    known = found.dims if found.dtype is not None and found.dims is not None else None
    rank = len(dims) if dims is not None and (known is None or len(known) == len(dims)) else None
    text = e.assign(made, "List[Tensor]", node.outputs[0])
    return SequenceValue(text, e.dtype(one), None if rank is None or known is None else known)


@row("SequenceErase")
def sequence_erase(
    e: Emitter, node: NodeView, items: Value, at: Value | None = None
) -> SequenceValue:
    found = _opened(e, items)
    place = "-1" if at is None else e.int(at)
    text = e.assign(f"run.erased({found.text}, {place})", "List[Tensor]", node.outputs[0])
    return SequenceValue(text, found.dtype, found.dims)


@row("SequenceLength")
def sequence_length(e: Emitter, node: NodeView, items: Value) -> HostValue:
    return host(e.number(f"len({_opened(e, items).text})", is_size=True))


@row("SplitToSequence")
def split_to_sequence(
    e: Emitter, node: NodeView, x: Value, sizes: Value | None = None
) -> SequenceValue:
    axis, keep = node.int("axis", 0), bool(node.int("keepdims", 1))
    dims = e.dims(x)
    if sizes is None:
        name = "run.pieces" if keep else "torch.unbind"
        made = f"{name}({e.tensor(x)}, {axis})"
    elif e.dims(sizes) == ():
        made = f"torch.split({e.tensor(x)}, {e.int(sizes)}, {axis})"
    else:
        made = f"torch.split({e.tensor(x)}, {e.ints(sizes)}, {axis})"
    rank = None if dims is None else len(dims) - (sizes is None and not keep)
    text = e.assign(f"list({made})", "List[Tensor]", node.outputs[0])
    return SequenceValue(text, e.dtype(x), None if rank is None else (None,) * rank)


@row("ConcatFromSequence")
def concat_from_sequence(e: Emitter, node: NodeView, items: Value) -> TensorValue:
    found, axis = _opened(e, items), node.int("axis", 0)
    name = "stack" if node.int("new_axis", 0) else "cat"
    return TensorValue(f"torch.{name}({found.text}, {axis})", found.dtype)


@row("Optional")
def optional(e: Emitter, node: NodeView, x: Value | None = None) -> Any:
    if x is not None:
        return x if not isinstance(x, (HostValue, ConstantValue)) else e.let(e.tensor(x), x.dtype)
    proto = node.attributes.get("type")
    is_list = proto is not None and proto.HasField("sequence_type")
    inner = SequenceValue("") if is_list else TensorValue("")
    kind = "List[Tensor]" if is_list else "Tensor"
    text = e.assign("None", f"Optional[{kind}]", node.outputs[0])
    return OptionalValue(text, inner, known=False)


@row("OptionalHasElement")
def optional_has_element(e: Emitter, node: NodeView, x: Value | None = None) -> HostValue:
    if not isinstance(x, OptionalValue):
        return host(x is not None, torch.bool)
    if x.known is not None:
        return host(x.known, torch.bool)
    return host(e.number(f"{x.text} is not None", "bool"), torch.bool)


@row("OptionalGetElement")
def optional_get_element(e: Emitter, node: NodeView, x: Value) -> Value:
    return e.opened(x) if isinstance(x, OptionalValue) else x

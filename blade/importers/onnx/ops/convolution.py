# SPDX-License-Identifier: Apache-2.0
"""Convolutions."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit import host_numbers as on
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import HostNumber, Sizes, TensorValue, Value

Pads = tuple[list[HostNumber], list[HostNumber]]
"""What is padded before and behind each spatial axis."""


def kernel_of(e: Emitter, node: NodeView, weight: Value | None) -> list[int]:
    """The sizes of the kernel, which have to be known."""
    found = node.ints("kernel_shape")
    if found is None and weight is not None:
        dims = e.dims(weight)
        if dims is not None and None not in dims:
            found = [one for one in dims[2:] if one is not None]
    if found is None:
        raise NotImported("The size of the kernel is not known.")
    return found


def pads_of(
    e: Emitter,
    node: NodeView,
    x: Value,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
) -> Pads:
    """The padding, which ``auto_pad`` may derive from the sizes."""
    how, rank = node.text("auto_pad", "NOTSET"), len(kernel)
    if how in ("NOTSET", ""):
        flat = node.ints("pads") or [0] * (2 * rank)
        return list(flat[:rank]), list(flat[rank:])
    if how == "VALID":
        return [0] * rank, [0] * rank
    before: list[HostNumber] = []
    after: list[HostNumber] = []
    for k in range(rank):
        size, reach = e.size(x, k + 2), dilations[k] * (kernel[k] - 1) + 1
        steps = on.div(e, on.add(e, size, strides[k] - 1), strides[k])
        need = on.add(e, on.mul(e, on.sub(e, steps, 1), strides[k]), reach)
        total = on.maximum(e, on.sub(e, need, size), 0)
        small = on.div(e, total, 2)
        large = on.sub(e, total, small)
        before.append(small if how == "SAME_UPPER" else large)
        after.append(large if how == "SAME_UPPER" else small)
    return before, after


def padded(e: Emitter, text: str, pads: Pads, fill: str = "0") -> tuple[str, list[HostNumber]]:
    """The text of an input, and the equal padding on both sides that is left for the op."""
    before, after = pads
    if before == after:
        return text, before
    flat = [one for pair in reversed(list(zip(before, after))) for one in pair]
    made = e.let(f"torch.constant_pad_nd({text}, {e.ints(flat)}, {fill})", name="padded")
    return made.text, [0] * len(before)


def spatial(
    sizes: Sizes | None, kernel: list[int], strides: list[int], dilations: list[int], pads: Pads
) -> list[int | None]:
    """The sizes after a convolution."""
    found: list[int | None] = []
    for k in range(len(kernel)):
        size, before, after = (None if sizes is None else sizes[k + 2]), pads[0][k], pads[1][k]
        if isinstance(size, int) and isinstance(before, int) and isinstance(after, int):
            reach = dilations[k] * (kernel[k] - 1) + 1
            found.append((size + before + after - reach) // strides[k] + 1)
        else:
            found.append(None)
    return found


@row("Conv")
def conv(e: Emitter, node: NodeView, x: Value, w: Value, b: Value | None = None) -> TensorValue:
    kernel = kernel_of(e, node, w)
    rank = len(kernel)
    strides = node.ints("strides") or [1] * rank
    dilations = node.ints("dilations") or [1] * rank
    pads = pads_of(e, node, x, kernel, strides, dilations)
    text, padding = padded(e, e.tensor(x), pads)
    bias = "None" if b is None else e.tensor(b)
    if not 1 <= rank <= 3:
        raise NotImported(f"A convolution over {rank} axes.")
    made = (
        f"torch.conv{rank}d({text}, {e.tensor(w)}, {bias}, {strides}, {e.ints(padding)}, "
        f"{dilations}, {node.int('group', 1)})"
    )
    sizes, weights = e.sizes(x), e.sizes(w)
    lead = (None if sizes is None else sizes[0], None if weights is None else weights[0])
    own = (*lead, *spatial(sizes, kernel, strides, dilations, pads))
    return TensorValue(made, e.dtype(x), own)


@row("ConvTranspose")
def conv_transpose(
    e: Emitter, node: NodeView, x: Value, w: Value, b: Value | None = None
) -> TensorValue:
    kernel = kernel_of(e, node, w)
    rank = len(kernel)
    strides = node.ints("strides") or [1] * rank
    dilations = node.ints("dilations") or [1] * rank
    extra = node.ints("output_padding") or [0] * rank
    before, after = _transposed_pads(e, node, x, kernel, strides, dilations, extra)
    bias = "None" if b is None else e.tensor(b)
    # torch takes one padding for both sides: the rest is cut off.
    common = [min(pair) for pair in zip(before, after)]
    cut = [(a - c, b - c) for a, b, c in zip(before, after, common)]
    is_plain = all(a >= 0 and b >= 0 for a, b in zip(before, after))
    padding = common if is_plain else [0] * rank
    if not is_plain:
        cut = list(zip(before, after))
    fits = all(p < max(s, d) for p, s, d in zip(extra, strides, dilations))
    if not fits:
        raise NotImported("The output is padded by a stride or more.")
    made = (
        f"torch.conv_transpose{rank}d({e.tensor(x)}, {e.tensor(w)}, {bias}, {strides}, {padding}, "
        f"{extra}, {node.int('group', 1)}, {dilations})"
    )
    for k, (left, right) in enumerate(cut):
        if left < 0 or right < 0:
            flat = [0] * (2 * (rank - 1 - k)) + [-left, -right]
            made = f"torch.constant_pad_nd({made}, {flat})"
        elif left or right:
            made = f"torch.ops.aten.slice({made}, {k + 2}, {left}, {-right if right else 2**62})"
    return TensorValue(made, e.dtype(x), (None,) * (rank + 2))


def _transposed_pads(
    e: Emitter,
    node: NodeView,
    x: Value,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    extra: list[int],
) -> tuple[list[int], list[int]]:
    """What is cut off the full result before and behind each spatial axis."""
    rank, how = len(kernel), node.text("auto_pad", "NOTSET")
    shape = node.ints("output_shape")
    if shape is None and how in ("NOTSET", "VALID", ""):
        flat = node.ints("pads") or [0] * (2 * rank)
        return flat[:rank], flat[rank:]
    dims = e.dims(x)
    before, after = [], []
    for k in range(rank):
        full = dilations[k] * (kernel[k] - 1) + 1 + extra[k]
        if shape is None:
            total = full - strides[k]  # the result is stride times the input
        else:
            size = None if dims is None else dims[k + 2]
            if size is None:
                raise NotImported("The output's shape is given, and the input's is not known.")
            total = strides[k] * (size - 1) + full - shape[-rank:][k]
        small = total // 2
        is_upper = how == "SAME_UPPER"
        before.append(small if is_upper else total - small)
        after.append(total - small if is_upper else small)
    return before, after


@row("ConvInteger")
def conv_integer(
    e: Emitter, node: NodeView, x: Value, w: Value, xz: Value | None = None, wz: Value | None = None
) -> TensorValue:
    """In float64, which holds such integers exactly."""
    wide = [f"{e.tensor(one)}.to(torch.float64)" for one in (x, w)]
    if xz is not None:
        wide[0] += f" - {e.tensor(xz)}.to(torch.float64)"
    if wz is not None:
        zero = f"{e.tensor(wz)}.to(torch.float64)"
        if e.rank(wz) == 1 and e.dims(wz) != (1,):
            zero += f".reshape({[-1] + [1] * (e.rank(w) - 1)})"
        wide[1] += f" - {zero}"
    values = [
        e.let(text, torch.float64, e.sizes(one)) for text, one in zip(wide, (x, w), strict=True)
    ]
    made = conv(e, node, *values)
    return TensorValue(f"{made.text}.to(torch.int32)", torch.int32, made.dims)


@row("Col2Im")
def col2im(e: Emitter, node: NodeView, x: Value, image: Value, block: Value) -> TensorValue:
    rank = (e.dims(image) or (0,))[0]
    if rank != 2:
        raise NotImported("Only images of two axes are put together.")
    strides = node.ints("strides") or [1, 1]
    dilations = node.ints("dilations") or [1, 1]
    flat = node.ints("pads") or [0] * 4
    text = e.ints(image)
    if flat[:2] != flat[2:]:
        raise NotImported("The padding differs between the sides.")
    made = (
        f"torch.ops.aten.col2im({e.tensor(x)}, {text}, {e.ints(block)}, {dilations}, {flat[:2]}, "
        f"{strides})"
    )
    sizes = e.sizes(x)
    return TensorValue(made, e.dtype(x), (sizes[0] if sizes else None, None, None, None))

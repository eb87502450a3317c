# SPDX-License-Identifier: Apache-2.0
"""Convolutions in the form that suits cuDNN: channels-last weights, like the data, and no bias.

ATen adds a bias in a separate kernel; here the kernel that reads the result adds it. Convolutions whose
kernels tile the image, as in vision transformers, become products of patches laid out as rows, and transposed ones,
as in U-Nets, products whose rows are laid out as patches. So do the gradients of their weights, and convolutions of
lines whose kernels have one tap.
"""

import sympy

from blade.backends.disc.gpu.passes.precompute_constants import packed
from blade.backends.disc.ir.convolution import (
    operands,
    output_padding,
    to_channels_first,
    to_channels_last,
)
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    numel,
    plain,
)
from blade.backends.disc.ir.rewrite import rewrite_values

_GIVEN = ("input", "const")


def rows_to_patches(graph: Graph) -> Graph:
    """``graph`` with products for transposed convolutions whose windows do not overlap."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        is_one = v.op == "conv" and _tiles(v) and v.attrs["transposed"]
        if not is_one or any(output_padding(v, v.shape, args[0].shape)):
            return None
        x, w, *bias = args
        kernel, out, axes = w.shape[2:], w.shape[1], len(v.shape) - 2
        columns = b.permute(w, to_channels_last(axes + 2))
        columns = b.permute(b.reshape(columns, (w.shape[0], numel(w.shape[1:]))), (1, 0))
        rows = b.make("linear", (x, columns), (*x.shape[:-1], columns.shape[0]), v.dtype)
        taps = b.reshape(rows, (*x.shape[:-1], *kernel, out))
        # in the order of the rows, so that one kernel adds the bias and reorders
        taps = b.pointwise("add", taps, b.broadcast(bias[0], taps.shape)) if bias else taps
        pixels = [k for axis in range(1, axes + 1) for k in (axis, axis + axes)]
        return b.reshape(b.permute(taps, (0, *pixels, 2 * axes + 1)), v.shape)

    return rewrite_values(graph, step)


def bias_after(graph: Graph) -> Graph:
    """``graph`` with separate additions of the convolutions' biases."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        bias = operands(v).bias if v.op == "conv" else None
        if bias is None:
            return None
        rest = [a for a, old in zip(args, v.args, strict=True) if old is not bias]
        bare = b.make("conv", rest, v.shape, v.dtype, **v.attrs)
        added = args[v.args.index(bias)]
        return b.pointwise("add", bare, b.broadcast(added, v.shape))

    return rewrite_values(graph, step)


def patches_to_rows(graph: Graph) -> Graph:
    """``graph`` with products for convolutions whose windows do not overlap: im2col only moves pixels."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "conv_weight_gradient":
            return _weight_gradient(b, v, args)
        if not (_tiles(v) or _is_of_points(v)) or len(args) != 2:
            return None
        x, w = args
        if v.attrs["transposed"]:
            if not _is_of_points(v):
                return None
            columns = b.permute(b.reshape(w, w.shape[:2]), (1, 0))
            return b.make("linear", (x, columns), v.shape, v.dtype)
        rows = _rows(b, x, v.shape[:-1], w.shape[2:])
        w = w if _has_channels_first(x) else b.permute(w, to_channels_last(len(w.shape)))
        return b.make(
            "linear", (rows, b.reshape(w, (w.shape[0], numel(w.shape[1:])))), v.shape, v.dtype
        )

    return rewrite_values(graph, step)


def _weight_gradient(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
    """The product of the pixels of one image and the patches of the other, which belong to them."""
    if not (_tiles(v) or _is_of_points(v)):
        return None
    rank = len(v.shape)
    pixels, image = args[:2][:: -1 if v.attrs["transposed"] else 1]
    rows = _rows(b, image, pixels.shape[:-1], v.shape[1:-1])
    count = numel(pixels.shape[:-1])
    columns = [b.permute(b.reshape(x, (count, x.shape[-1])), (1, 0)) for x in (pixels, rows)]
    made = b.make("linear", columns, tuple(x.shape[0] for x in columns), v.dtype)
    if not _has_channels_first(image):
        return b.reshape(made, v.shape)
    made = b.reshape(made, [v.shape[k] for k in to_channels_first(rank)])
    return b.permute(made, to_channels_last(rank))


def _rows(b: IrBuilder, x: Value, pixels: Shape, kernel: Shape) -> Value:
    """[N, *spatial, C] -> [N, *pixels, depth]: the patch at each pixel, in the order of the weights, unless that would
    split the pixels of channels-last data.
    """
    rank, given = len(x.shape), x
    for axis, size in enumerate(kernel, 1):  # pixels left over at the far border are not read
        x = b.slice(x, axis, 0, 1, plain(sympy.sympify(pixels[axis]) * size))
    # [N, *spatial, C] -> [N, (pixels, taps) of each axis, C] -> [N, *pixels, depth]
    split = [d for pair in zip(pixels[1:], kernel, strict=True) for d in pair]
    x = b.reshape(x, (pixels[0], *split, x.shape[-1]))
    places, taps = range(1, 2 * rank - 4, 2), range(2, 2 * rank - 3, 2)
    channels = len(x.shape) - 1
    depth = (channels, *taps) if _has_channels_first(given) else (*taps, channels)
    x = b.permute(x, (0, *places, *depth))
    return b.reshape(x, (*pixels, numel([*kernel, given.shape[-1]])))


def _has_channels_first(x: Value) -> bool:
    """Whether ``x`` [N, *spatial, C] lies as [N, C, *spatial]."""
    return x.op == "permute" and x.attrs["perm"] == to_channels_last(len(x.shape))


def _tiles(v: Value) -> bool:
    """Is ``v`` a convolution of more than one tap whose stride equals its kernel size, or its weight's gradient?"""
    kernel = _kernel_alone(v)
    return kernel is not None and kernel == tuple(v.attrs["stride"]) and set(kernel) != {1}


def _is_of_points(v: Value) -> bool:
    """Is ``v`` a convolution of lines whose kernel has one tap, or its weight's gradient?"""
    return len(v.shape) == 3 and _kernel_alone(v) == (1,) == tuple(v.attrs["stride"])


def _kernel_alone(v: Value) -> Shape | None:
    """The kernel's sizes of ``v``, a convolution of all channels that nothing pads or follows, or a gradient of one."""
    if v.op not in ("conv", "conv_weight_gradient") or v.attrs["groups"] != 1:
        return None
    a = v.attrs
    if set(a["padding"]) != {0} or set(a["dilation"]) != {1} or "trailing" in a:
        return None
    if v.op == "conv_weight_gradient":
        return v.shape[1:-1]
    alone = a["activation"] is None and operands(v).residual is None
    return tuple(v.args[1].shape[2:]) if alone else None


def weights_channels_last(graph: Graph) -> Graph:
    """``graph`` with channels-last weights: constant ones copied once, those converted in each call converted so."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "permute" and v.args[0].op == "cast" and v.args[0].args[0].op in _GIVEN:
            last = to_channels_last(len(v.shape))
            return _converted(b, args[0]) if v.attrs["perm"] == last else None
        if v.op != "conv":
            return None
        weight, rank = args[1], len(args[1].shape)
        if weight.shape[1] == 1 or all(d == 1 for d in weight.shape[2:]):
            return None  # both orders are equal
        made = _converted(b, weight)
        if made is None:
            return None
        kernel = b.permute(made, to_channels_first(rank))
        return b.make("conv", [args[0], kernel, *args[2:]], v.shape, v.dtype, **v.attrs)

    return rewrite_values(graph, step)


def _converted(b: IrBuilder, weight: Value) -> Value | None:
    """``weight`` with channels last, made once or by the conversion of its dtype; ``None`` where neither is."""
    source = weight.args[0] if weight.op == "cast" else weight
    last = b.permute(source, to_channels_last(len(weight.shape)))
    made = b.make("cast", [last], last.shape, weight.dtype)
    return packed(b, [last], made) or (made if source is not weight else None)

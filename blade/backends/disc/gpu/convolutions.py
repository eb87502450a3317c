# SPDX-License-Identifier: Apache-2.0
"""What cuDNN wants of a convolution: weights laid out like the data, channels last, and no bias.

ATen adds a bias in a pass of its own; here it goes into the kernel that reads the result. Kernels that tile
the image, as those of vision transformers do, are no convolutions: patches that lie in rows are multiplied.
"""

import sympy

from blade.backends.disc.convolution import operands, to_channels_first, to_channels_last
from blade.backends.disc.gpu.constants import packed
from blade.backends.disc.ir import Builder, Graph, Value, numel, plain
from blade.backends.disc.rebuild import rebuild


def bias_after(graph: Graph) -> Graph:
    """``graph`` with the biases of convolutions added behind them."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        bias = operands(v).bias if v.op == "conv" else None
        if bias is None:
            return None
        rest = [a for a, old in zip(args, v.args, strict=True) if old is not bias]
        bare = b.make("conv", rest, v.shape, v.dtype, **v.attrs)
        added = args[v.args.index(bias)]
        return b.pointwise("add", bare, b.broadcast(added, v.shape))

    return rebuild(graph, step)


def patches_to_rows(graph: Graph) -> Graph:
    """``graph`` with convolutions whose taps each see other pixels as products: im2col only moves them."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if not _tiles(v) or len(args) != 2:
            return None
        x, w = args
        kernel, rank = w.shape[2:], len(v.shape)
        for axis, size in enumerate(kernel, 1):  # what is left over at the far border is not seen
            x = b.slice(x, axis, 0, 1, plain(sympy.sympify(v.shape[axis]) * size))
        # [N, *spatial, C] -> [N, (pixels, taps) of each axis, C] -> [N, *pixels, depth]
        split = [d for pair in zip(v.shape[1:-1], kernel, strict=True) for d in pair]
        x = b.reshape(x, (v.shape[0], *split, w.shape[1]))
        pixels, taps = range(1, 2 * rank - 4, 2), range(2, 2 * rank - 3, 2)
        channels = len(x.shape) - 1
        # as the weights lie, unless that would tear up the pixels of data that lies channels last
        first = args[0].op == "permute" and args[0].attrs["perm"] == tuple(to_channels_last(rank))
        depth = (channels, *taps) if first else (*taps, channels)
        w = w if first else b.permute(w, to_channels_last(rank))
        rows = b.permute(x, (0, *pixels, *depth))
        rows = b.reshape(rows, (*v.shape[:-1], numel(w.shape[1:])))
        return b.make(
            "linear", (rows, b.reshape(w, (w.shape[0], numel(w.shape[1:])))), v.shape, v.dtype
        )

    return rebuild(graph, step)


def _tiles(v: Value) -> bool:
    """Whether ``v`` is a convolution whose stride is the size of its kernel, more than one tap."""
    if v.op != "conv" or v.attrs["transposed"] or v.attrs["groups"] != 1:
        return False
    kernel, a = v.args[1].shape[2:], v.attrs
    plain_ = set(a["padding"]) == {0} and set(a["dilation"]) == {1}
    alone = a["activation"] is None and operands(v).residual is None
    return alone and plain_ and tuple(kernel) == tuple(a["stride"]) and set(kernel) != {1}


def weights_channels_last(graph: Graph) -> Graph:
    """``graph`` with constant weights of convolutions copied once into channels-last memory."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "conv":
            return None
        weight, rank = args[1], len(args[1].shape)
        if weight.shape[1] == 1 or all(d == 1 for d in weight.shape[2:]):
            return None  # both orders are one
        source = weight.args[0] if weight.op == "cast" else weight
        last = b.permute(source, to_channels_last(rank))
        made = packed(b, [last], b.make("cast", [last], last.shape, weight.dtype))
        if made is None:
            return None
        kernel = b.permute(made, to_channels_first(rank))
        return b.make("conv", [args[0], kernel, *args[2:]], v.shape, v.dtype, **v.attrs)

    return rebuild(graph, step)

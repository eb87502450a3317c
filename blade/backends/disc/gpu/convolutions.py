# SPDX-License-Identifier: Apache-2.0
"""What cuDNN wants of a convolution: weights laid out like the data, channels last, and no bias.

ATen adds a bias in a pass of its own; here it goes into the kernel that reads the result.
"""

from blade.backends.disc.convolution import operands, to_channels_first, to_channels_last
from blade.backends.disc.gpu.constants import packed
from blade.backends.disc.ir import Builder, Graph, Value
from blade.backends.disc.legalize import rebuild


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

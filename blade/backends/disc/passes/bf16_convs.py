# SPDX-License-Identifier: Apache-2.0
"""Convolutions of bfloat16 on CPU: those for which code is generated, and pixels that are padded to whole pairs.

%3 bf16[s0, s1, s2, 64] = conv %1 %2                 %1 bf16[s0, s1, s2, 3], padding (3, 3)

%4 bf16[s0, s1, s2 + 6, 4] = concat .. %1 ..         zeros around every row, and one after every pixel
%3 bf16[s0, s1, s2, 64] = conv %4 %2                 padding (3, 0): the taps of a row are adjacent
"""

import torch

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import adjacent_taps, is_depthwise, operands
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, plain
from blade.backends.disc.ir.rewrite import rewrite_values

F32, BF16 = torch.float32, torch.bfloat16
_VECTOR = 16  # columns
_FEW = 32  # below so many channels, one tap is too short a row


def is_narrow_conv(v: Value) -> bool:
    """Whether code is generated for the `conv` ``v`` on bfloat16: depthwise, or rows of whole pairs in large groups."""
    if not _has_narrow_operands(v):
        return False
    channels = operands(v).x.shape[-1]
    in_pairs = isinstance(channels, int) and channels * adjacent_taps(v) % 2 == 0
    return is_depthwise(v) or (in_pairs and _has_large_groups(v))


def _has_large_groups(v: Value) -> bool:
    """Whether the groups of ``v`` suit vectors. Small ones are merged, and multiplied by zeros: that is faster than
    products of float32, which weights of float32 would have instead, and slower than oneDNN's of bfloat16."""
    weight, groups = operands(v).weight, v.attrs["groups"]
    columns, channels = (int(d) for d in weight.shape[:2])
    fills = columns // groups >= _VECTOR or weight.dtype == F32
    return groups == 1 or (channels > 1 and fills)


def _has_narrow_operands(v: Value) -> bool:
    given = operands(v)
    if v.attrs["transposed"] or given.x.dtype != BF16 or v.dtype not in (F32, BF16):
        return False
    rest = [x for x in v.args[1:] if x is not given.residual]
    return all(x.dtype in (F32, BF16) for x in v.args) and None not in map(parts_of, rest)


def pair_channels(graph: Graph) -> Graph:
    """``graph`` with zeros in the pixels of convolutions whose rows would not consist of whole pairs."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "conv" or is_narrow_conv(v) or not can_pair(v):
            return None
        return _paired(b, Value(v.id, v.op, tuple(args), v.attrs, v.shape, v.dtype, v.strides))

    return rewrite_values(graph, step)


def can_pair(v: Value) -> bool:
    """Whether padding makes the `conv` ``v`` one that code is generated for."""
    return (
        _has_narrow_operands(v) and v.attrs["groups"] == 1 and isinstance(v.args[0].shape[-1], int)
    )


def _paired(b: IrBuilder, v: Value) -> Value:
    x, *rest = v.args
    attrs = {"trailing": v.attrs["padding"], **v.attrs}
    left, right = attrs["padding"][-1], attrs["trailing"][-1]
    if int(x.shape[-1]) < _FEW and v.attrs["dilation"][-1] == 1 and left >= 0 and right >= 0:
        x = _with_zeros(b, x, len(x.shape) - 2, left, right)
        attrs = {**attrs, **{n: (*attrs[n][:-1], 0) for n in ("padding", "trailing")}}
    if attrs["trailing"] == attrs["padding"]:
        del attrs["trailing"]
    made = b.make("conv", [x, *rest], v.shape, v.dtype, **attrs)
    if is_narrow_conv(made):
        return made
    x = _with_zeros(b, x, len(x.shape) - 1, 0, 1)
    return b.make("conv", [x, *rest], v.shape, v.dtype, **attrs)


def _with_zeros(b: IrBuilder, x: Value, axis: int, before: int, after: int) -> Value:
    """``x`` between so many zeros along ``axis``."""

    def zeros(count: int) -> list[Value]:
        shape = [count if k == axis else d for k, d in enumerate(x.shape)]
        return [b.fill(0, shape, x.dtype)] if count else []

    parts = [*zeros(before), x, *zeros(after)]
    shape = [plain(d + (before + after) * (k == axis)) for k, d in enumerate(x.shape)]
    return b.make("concat", parts, shape, x.dtype, axis=axis)

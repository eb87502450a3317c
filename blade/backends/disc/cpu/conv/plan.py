# SPDX-License-Identifier: Apache-2.0
"""The call for a `conv` of the IR as generated code: operands, sizes and packed weights.

plan(value, target) -> ConvPlan | None        None: ATen computes it

Constant weights are packed once per engine, computed weights before each call. A transposed convolution of
stride 1 is computed as a convolution with a reversed kernel and exchanged input and output channels.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.conv import depthwise, winograd
from blade.backends.disc.cpu.conv import implicit_gemm as conv
from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv.micro_kernel import heights
from blade.backends.disc.cpu.conv.weights import (
    ConvWeights,
    pack_panels,
    pack_winograd,
    weights_of,
)
from blade.backends.disc.cpu.gemm import bf16_gemm
from blade.backends.disc.cpu.gemm.bf16_plan import row_of
from blade.backends.disc.cpu.gemm.packing import PackedColumns
from blade.backends.disc.ir.convolution import (
    CLAMPS,
    ConvOperands,
    is_depthwise,
    operands,
    pads_at_end,
)
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.passes.bf16_convs import is_narrow_conv
from blade.backends.disc.program.instructions import NativeCall, PackedBuffer, ScratchBuffer
from blade.backends.disc.target.cpu import CpuTarget

MlirTexts = tuple[tuple[str, str], ...]
ConvPlan = tuple[NativeCall, MlirTexts, tuple[NativeCall, ...]]
"""The call, the functions it needs, and the calls before it."""

_PAGE = 4096  # rows at multiples of it map to the same sets of L1
_LEAST = 32  # input and output channels from which Winograd's transforms pay
_TRANSFORMED = 6400  # floats per position of a block's transformed inputs: all 16 positions fit L2
_FEW = 32  # below so many channels, the taps along w are merged


@dataclass(frozen=True)
class _ConvGeometry:
    """A convolution's geometry over three axes; missing axes come first."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels: int  # of the input
    columns: int  # of the result
    inside: bool  # whether no tap along w lies outside

    @property
    def depth(self) -> int:
        return self.channels // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.channels == self.columns and self.groups > 1


def plan(value: Value, target: CpuTarget) -> ConvPlan | None:
    """The call for ``value``, its code, and the calls that pack its weights; ``None`` if ATen computes it."""
    given, transposed = operands(value), value.attrs["transposed"]
    if any(a.dtype != torch.float32 for a in value.args) and not is_narrow_conv(value):
        return None
    weights = weights_of(given.weight, transposed)
    if weights is None or not isinstance(given.x.shape[-1], int):
        return None
    window = _window(value, given)
    if transposed and (window.stride != (1, 1, 1) or window.groups != 1 or min(window.padding) < 0):
        return None
    if window.is_depthwise:
        return _depthwise(value, given, window, weights, target) if is_depthwise(value) else None
    if _is_minimal(value, window, target):
        return _winograd(value, given, window, weights, target)
    return _general(value, given, window, weights, target)


def _window(value: Value, given: ConvOperands) -> _ConvGeometry:
    a = value.attrs
    kernel = tuple(int(k) for k in three(given.weight.shape[2:], 1))
    padding, dilation = three(a["padding"], 0), three(a["dilation"], 1)
    if a["transposed"]:  # the reach of the reversed kernel minus the original padding
        reach = (g * (k - 1) for g, k in zip(dilation, kernel, strict=True))
        padding = tuple(r - p for r, p in zip(reach, padding, strict=True))
    return _ConvGeometry(
        kernel,
        three(a["stride"], 1),
        padding,
        dilation,
        a["groups"],
        int(given.x.shape[-1]),
        int(value.shape[-1]),
        padding[2] <= 0 and not pads_at_end(value),
    )


def three(values: Sequence[Any], missing: int) -> tuple[Any, ...]:
    """One value each for d, h, w."""
    return (missing,) * (3 - len(values)) + tuple(values)


def _general(
    value: Value, given: ConvOperands, w: _ConvGeometry, weights: ConvWeights, target: CpuTarget
) -> ConvPlan:
    merged = w.groups == 1 and w.dilation[2] == 1 and (w.depth < _FEW or w.inside)
    width = w.kernel[2] if merged else 1
    taps = (*w.kernel[:2], 1) if merged else w.kernel
    depth = w.depth * width
    partial = merged and width > 1 and not w.inside
    collide = math.prod(taps) == 1 and w.groups == 1 and depth * 4 % _PAGE == 0
    copied = depth + target.lanes if collide else 0
    block = conv.block_rows(target)
    pitch = -(-block // 16) * 16
    pass_taps, pass_depth = _passes(math.prod(taps), depth)
    rows = numel(value.shape[:-1])
    blocks = FloorDiv(sympy.sympify(rows) + block - 1, block)
    runs = runs_per_group(blocks, -(-(w.columns // w.groups) // target.lanes))
    inputs, results = (three(v.shape[1:-1], 1) for v in (given.x, value))
    geometry = (*inputs, *results, *taps, *w.stride, *w.padding, *w.dilation)
    ints = (
        *(rows, pitch, w.channels, depth, width, copied, int(partial)),
        *geometry,
        *(w.columns, w.groups, runs, pass_taps, pass_depth, block),
        *(w.columns if given.residual else 0, *_bounds(value)),
    )
    assert len(ints) == len(conv.SIZES), (ints, conv.SIZES)
    slots = pitch * math.prod(taps) * depth * partial + pitch * copied
    scratch = pitch * (conv_rows.ARRAYS + math.prod(taps)) * 8 + slots * 4
    packed, code, before = _panels(w, weights, target)
    zeros = _zeros(w, target)
    call = NativeCall(
        conv.NAME,
        plain(blocks * runs * w.groups),
        plain(sympy.Min(rows, block) * w.taps * w.depth * conv.RUN),
        scratch,
        (given.x, packed, given.bias or zeros, zeros, given.residual or zeros, value),
        ints,
        # with several passes the result holds partial sums
        _over(given) if pass_taps >= math.prod(taps) and pass_depth >= depth else (),
    )
    return call, ((conv.NAME, conv.conv_text(target)), *code, *_zeros_code(target)), before


def runs_per_group(blocks: sympy.Expr, panels: int) -> Dim:
    """Runs of panels per group: more if the number of blocks is odd, so that threads get equal shares."""
    few = -(-panels // conv.RUN)
    return plain(few * (1 + sympy.Mod(blocks, 2))) if 2 * few <= panels else few


def _depthwise(
    value: Value, given: ConvOperands, w: _ConvGeometry, weights: ConvWeights, target: CpuTarget
) -> ConvPlan:
    """A depthwise convolution, vectorized along the channels."""
    dtypes = (given.x.dtype, (given.residual or value).dtype, value.dtype)
    along = (w.kernel[2], w.stride[2], w.dilation[2])
    taps = depthwise.DepthwiseTaps(*along, *dtypes, w.kernel[0] > 1)
    inputs, results = (three(v.shape[1:-1], 1) for v in (given.x, value))
    ints = (
        *(w.channels, *inputs, *results, *w.kernel[:2], *w.stride[:2], *w.padding[:2]),
        *(*w.dilation[:2], w.padding[2], w.columns if given.residual else 0),
        *_bounds(value),
    )
    assert len(ints) == len(depthwise.SIZES), (ints, depthwise.SIZES)
    runs = -(-w.channels // (depthwise.RUN * target.lanes))
    packed, code, before = _panels(w, weights, target)
    bias, of_bias = _wide_bias(given, w, target)
    zeros = _zeros(w, target)
    call = NativeCall(
        taps.name,
        plain(sympy.sympify(value.shape[0]) * results[0] * results[1] * runs),
        plain(sympy.sympify(results[2]) * w.taps * min(w.channels, depthwise.RUN * target.lanes)),
        0,
        (given.x, packed, bias or zeros, zeros, given.residual or zeros, value),
        ints,
    )
    text = depthwise.depthwise_text(taps, target)
    code = (*code, *of_bias, *_zeros_code(target))
    return call, ((taps.name, text), *code), before


def _wide_bias(
    given: ConvOperands, w: _ConvGeometry, target: CpuTarget
) -> tuple[Value | PackedBuffer | None, MlirTexts]:
    """The bias as float32, and what packs it."""
    if given.bias is None or given.bias.dtype == torch.float32:
        return given.bias, ()
    name = bf16_gemm.row_name(given.bias.dtype)
    row = row_of([given.bias], PackedColumns(target.lanes, w.columns))
    return row, ((name, bf16_gemm.row_text(given.bias.dtype)),)


def _is_minimal(value: Value, w: _ConvGeometry, target: CpuTarget) -> bool:
    """Does Winograd's algorithm apply, and save more products than its transforms cost?"""
    applies = len(value.shape) == 4 and w.kernel == (1, 3, 3) and w.groups == 1
    applies = applies and w.stride == (1, 1, 1) and w.dilation == (1, 1, 1)
    even = w.channels % target.lanes == 0 and w.columns % target.lanes == 0
    return applies and even and min(w.channels, w.columns) >= _LEAST


def _winograd(
    value: Value, given: ConvOperands, w: _ConvGeometry, weights: ConvWeights, target: CpuTarget
) -> ConvPlan:
    images, height, width, _ = value.shape
    down, across = (FloorDiv(sympy.sympify(d) + 1, 2) for d in (height, width))
    tiles = plain(sympy.sympify(images) * down * across)
    rows = heights(target)[0]
    block = max(2, _TRANSFORMED // (w.channels * rows)) * rows
    _, pass_depth = _passes(1, w.channels)
    ints = (
        *(tiles, w.channels, w.columns, *given.x.shape[1:3], height, width),
        *(plain(down), plain(across), *w.padding[1:], block, pass_depth),
        *(w.columns if given.residual else 0, *_bounds(value)),
    )
    assert len(ints) == len(winograd.SIZES), (ints, winograd.SIZES)
    run = conv.RUN * target.lanes
    runs = -(-w.columns // run)
    blocks = FloorDiv(sympy.sympify(tiles) + block - 1, block)
    floats = (w.channels + target.lanes + run) * block * winograd.PLACES
    packed, code, before = pack_winograd(weights, (w.channels, w.columns), target)
    zeros = _zeros(w, target)
    call = NativeCall(
        winograd.NAME,
        plain(sympy.sympify(blocks) * runs),
        plain(sympy.Min(tiles, block) * winograd.PLACES * w.channels * conv.RUN),
        block * winograd.PLACES * 8 + floats * 4,
        (given.x, packed, given.bias or zeros, zeros, given.residual or zeros, value),
        ints,
        _over(given),
    )
    return call, ((conv.NAME, conv.conv_text(target)), *code, *_zeros_code(target)), before


def _over(given: ConvOperands) -> tuple[tuple[int, int], ...]:
    """The result may overwrite the residual: each element of the residual is read just before its store."""
    return ((4, 5),) if given.residual else ()


def _passes(taps: int, depth: int) -> tuple[int, int]:
    """The number of taps, and the depth within a tap, that one pass covers."""
    if depth > conv.BLOCK_DEPTH:
        count = -(-depth // conv.BLOCK_DEPTH)
        return 1, -(-depth // (4 * count)) * 4
    most = conv.BLOCK_DEPTH // depth
    count = -(-taps // most)
    return -(-taps // count), depth


def _panels(
    w: _ConvGeometry, weights: ConvWeights, target: CpuTarget
) -> tuple[PackedBuffer | ScratchBuffer, MlirTexts, tuple[NativeCall, ...]]:
    groups = 1 if w.is_depthwise else w.groups  # in a depthwise convolution, channels are columns
    return pack_panels(weights, (w.columns, w.depth, *w.kernel), groups, target)


def _zeros(w: _ConvGeometry, target: CpuTarget) -> PackedBuffer:
    """The zeros that stand for pixels outside, as many as any kernel reads."""
    most = max(w.columns, w.channels * w.kernel[2]) + target.lanes
    return PackedBuffer(conv.PACK, torch.float32, most, ())


def _zeros_code(target: CpuTarget) -> MlirTexts:
    return ((conv.PACK, conv.pack_text(target)),)


def _bounds(value: Value) -> tuple[int, int]:
    """Bit patterns of the result's two bounds as floats, each in the low half of an integer."""
    name = value.attrs["activation"]
    low, high = (-math.inf, math.inf) if name is None else CLAMPS[name]
    return _bits(low), _bits(math.inf if high is None else high)


def _bits(value: float) -> int:
    """A float's bit pattern, in the low half of an integer."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])

# SPDX-License-Identifier: Apache-2.0
"""Weights of a generated convolution, packed in the order in which its kernels read them.

Constants become a ``PackedBuffer``, filled once per loaded engine. Computed weights (as in training) are
packed into scratch by a separate call before every convolution.
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.conv import implicit_gemm as conv
from blade.backends.disc.cpu.conv import pack as conv_pack
from blade.backends.disc.cpu.conv import winograd
from blade.backends.disc.ir.constant_parts import ConstantPart, parts_of
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import (
    Fill,
    NativeCall,
    PackedBuffer,
    ScratchBuffer,
)
from blade.backends.disc.target.cpu import CpuTarget

MlirTexts = tuple[tuple[str, str], ...]
PackedWeights = tuple[PackedBuffer | ScratchBuffer, MlirTexts, tuple[NativeCall, ...]]
"""The buffer, the function that fills it, and the calls to that function before each convolution."""


@dataclass(frozen=True)
class WeightSource:
    """``size`` output channels that start at ``first``: offset and steps (o, c, then d, h, w) in elements."""

    first: int
    size: int
    offset: int
    steps: tuple[int, ...]
    constant: int = -1


@dataclass(frozen=True)
class ConvWeights:
    """The source of a convolution's weights: constants of ``dtype``, or one ``computed`` value of float32."""

    sources: tuple[WeightSource, ...]
    computed: Value | None
    dtype: torch.dtype = torch.float32


def weights_of(weight: Value, transposed: bool) -> ConvWeights | None:
    """``weight`` [O, C, *kernel]; if ``transposed``, [C, O, *kernel] with its taps reversed."""
    kernel = tuple(int(k) for k in weight.shape[2:])
    parts = parts_of(weight)
    if parts is not None:
        if transposed and len(parts) != 1:
            return None
        sources = [_source(p, kernel, transposed, int(weight.shape[1])) for p in parts]
        return ConvWeights(tuple(sources), None, weight.dtype)
    view = view_of(weight)
    if view is None or view.base.op == "const":  # a constant that must not be stored twice
        return None
    if not all(isinstance(s, int) for s in (*view.strides, *weight.shape)):
        return None
    strides = tuple(int(s) for s in view.strides)
    whole = ConstantPart(-1, 0, int(weight.shape[0]), 0, strides)
    return ConvWeights((_source(whole, kernel, transposed, int(weight.shape[1])),), weight)


def _source(
    part: ConstantPart, kernel: tuple[int, ...], transposed: bool, columns: int
) -> WeightSource:
    outer, inner, *taps = part.strides
    offset, size = part.offset, part.size
    if transposed:
        outer, inner, size = inner, outer, columns
        offset += sum(s * (k - 1) for s, k in zip(taps, kernel, strict=True))
        taps = [-s for s in taps]
    steps = (outer, inner, *(0,) * (3 - len(taps)), *taps)
    return WeightSource(part.first, size, offset, steps, part.constant)


def pack_panels(
    weights: ConvWeights, sizes: tuple[int, ...], groups: int, target: CpuTarget
) -> PackedWeights:
    """Panels of output channels, taps, depth; ``sizes`` are output channels, depth, and taps along d, h, w."""
    columns, depth, *taps = sizes
    panels = groups * -(-(columns // groups) // target.lanes)
    numel = panels * taps[0] * taps[1] * taps[2] * depth * target.lanes
    if weights.computed is None:
        fills = tuple(
            Fill(s.constant, s.size, (columns, s.first, s.offset, depth, *taps, *s.steps, groups))
            for s in weights.sources
        )
        name = conv.pack_name(weights.dtype)
        code = (name, conv.pack_text(target, weights.dtype))
        return PackedBuffer(name, torch.float32, numel, fills), (code,), ()
    (source,) = weights.sources
    room = ScratchBuffer(torch.float32, numel)
    ints = (columns, source.offset, depth, *taps, *source.steps, groups)
    call = _call(conv_pack.NAME, panels, numel, (weights.computed, room), ints)
    return room, ((conv_pack.NAME, conv_pack.panels_text(target)),), (call,)


def pack_winograd(
    weights: ConvWeights, channels: tuple[int, int], target: CpuTarget
) -> PackedWeights:
    """Winograd-transformed weights; ``channels``: of the input and of the result."""
    depth, columns = channels
    numel = winograd.PLACES * depth * columns
    if weights.computed is None:
        fills = tuple(
            Fill(s.constant, s.size, (s.first, s.offset, depth, *s.steps[:2], *s.steps[3:]))
            for s in weights.sources
        )
        code = (winograd.PACK, winograd.pack_text(target))
        return PackedBuffer(winograd.PACK, torch.float32, numel, fills), (code,), ()
    (source,) = weights.sources
    room = ScratchBuffer(torch.float32, numel)
    ints = (source.offset, depth, *source.steps[:2], *source.steps[3:])
    call = _call(conv_pack.WINOGRAD, columns // target.lanes, numel, (weights.computed, room), ints)
    return room, ((conv_pack.WINOGRAD, conv_pack.winograd_panels_text(target)),), (call,)


def _call(
    name: str,
    panels: int,
    numel: int,
    operands: tuple[Value | ScratchBuffer, ...],
    ints: tuple[int, ...],
) -> NativeCall:
    # moving one element alone costs about as much as computing a few in vectors
    return NativeCall(name, panels, 4 * numel // max(1, panels), 0, operands, ints)

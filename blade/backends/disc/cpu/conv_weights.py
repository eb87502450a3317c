# SPDX-License-Identifier: Apache-2.0
"""Weights of a generated convolution in the order its kernels read them.

Constants become a ``Packed``, made once per loaded engine. What is computed, as in training, is laid out by a call of
its own before every convolution, in memory between the two.
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.constants import Part, parts_of
from blade.backends.disc.cpu import conv, conv_pack, winograd
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.ir import Value
from blade.backends.disc.steps import Fill, NativeCall, Packed, Scratch
from blade.backends.disc.views import view_of

Code = tuple[tuple[str, str], ...]
Laid = tuple[Packed | Scratch, Code, tuple[NativeCall, ...]]
"""The buffer, the function that fills it, and the calls that do so in each call."""


@dataclass(frozen=True)
class Source:
    """``size`` output channels from ``first`` on: offset and steps (o, c, then d, h, w) in elements."""

    first: int
    size: int
    offset: int
    steps: tuple[int, ...]
    constant: int = -1


@dataclass(frozen=True)
class Weights:
    """Where a convolution's weights lie: in constants, or all in ``computed``."""

    sources: tuple[Source, ...]
    computed: Value | None


def weights_of(weight: Value, transposed: bool) -> Weights | None:
    """``weight`` [O, C, *kernel], or, ``transposed``, [C, O, *kernel] with its taps in reverse."""
    kernel = tuple(int(k) for k in weight.shape[2:])
    parts = parts_of(weight)
    if parts is not None:
        if transposed and len(parts) != 1:
            return None
        sources = [_source(p, kernel, transposed, int(weight.shape[1])) for p in parts]
        return Weights(tuple(sources), None)
    view = view_of(weight)
    if view is None or view.base.op == "const":  # one that is to be in memory once
        return None
    if not all(isinstance(s, int) for s in (*view.strides, *weight.shape)):
        return None
    strides = tuple(int(s) for s in view.strides)
    whole = Part(-1, 0, int(weight.shape[0]), 0, strides)
    return Weights((_source(whole, kernel, transposed, int(weight.shape[1])),), weight)


def _source(part: Part, kernel: tuple[int, ...], transposed: bool, columns: int) -> Source:
    outer, inner, *taps = part.strides
    offset, size = part.offset, part.size
    if transposed:
        outer, inner, size = inner, outer, columns
        offset += sum(s * (k - 1) for s, k in zip(taps, kernel, strict=True))
        taps = [-s for s in taps]
    steps = (outer, inner, *(0,) * (3 - len(taps)), *taps)
    return Source(part.first, size, offset, steps, part.constant)


def pack_panels(weights: Weights, sizes: tuple[int, ...], groups: int, target: Target) -> Laid:
    """Panels of output channels, taps, depth; ``sizes`` are output channels, depth, and taps along d, h, w."""
    columns, depth, *taps = sizes
    panels = groups * -(-(columns // groups) // target.lanes)
    numel = panels * taps[0] * taps[1] * taps[2] * depth * target.lanes
    if weights.computed is None:
        fills = tuple(
            Fill(s.constant, s.size, (columns, s.first, s.offset, depth, *taps, *s.steps, groups))
            for s in weights.sources
        )
        code = (conv.PACK, conv.pack_text(target))
        return Packed(conv.PACK, torch.float32, numel, fills), (code,), ()
    (source,) = weights.sources
    room = Scratch(torch.float32, numel)
    ints = (columns, source.offset, depth, *taps, *source.steps, groups)
    call = _call(conv_pack.NAME, panels, numel, (weights.computed, room), ints)
    return room, ((conv_pack.NAME, conv_pack.panels_text(target)),), (call,)


def pack_winograd(weights: Weights, channels: tuple[int, int], target: Target) -> Laid:
    """Transformed weights; ``channels`` of the input and of the result."""
    depth, columns = channels
    numel = winograd.PLACES * depth * columns
    if weights.computed is None:
        fills = tuple(
            Fill(s.constant, s.size, (s.first, s.offset, depth, *s.steps[:2], *s.steps[3:]))
            for s in weights.sources
        )
        code = (winograd.PACK, winograd.pack_text(target))
        return Packed(winograd.PACK, torch.float32, numel, fills), (code,), ()
    (source,) = weights.sources
    room = Scratch(torch.float32, numel)
    ints = (source.offset, depth, *source.steps[:2], *source.steps[3:])
    call = _call(conv_pack.WINOGRAD, columns // target.lanes, numel, (weights.computed, room), ints)
    return room, ((conv_pack.WINOGRAD, conv_pack.winograd_panels_text(target)),), (call,)


def _call(
    name: str, panels: int, numel: int, operands: tuple[Value | Scratch, ...], ints: tuple[int, ...]
) -> NativeCall:
    # an element moved by itself costs about as much as a few that are computed in vectors
    return NativeCall(name, panels, 4 * numel // max(1, panels), 0, operands, ints)

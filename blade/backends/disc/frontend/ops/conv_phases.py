# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution as ordinary ones, over the phases of its stride.

With stride s and padding p, element j * s + i of the result is the sum over t of x[j + a - t] * w[r + t * s], where
i + p = a * s + r: phase i is an ordinary convolution of x with every s-th tap, reversed. Adjacent phases with equal a
and equally many taps are the columns of one convolution, whose results [.., j, i, O] are already in the order of the
result along one axis. More axes are interleaved by a permutation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product

import sympy
import torch

from blade.backends.disc.frontend.ops.table import Lowering
from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.ir.kernel import Dim

_MOST_PHASES = 64
"""Every phase is packed by itself."""
_FEW = 16
"""Channels of a result below which the columns of one phase fill no vector."""


@dataclass(frozen=True)
class _PhaseRun:
    """``count`` adjacent phases with ``taps`` taps each.

    ``first``: the first tap of the first phase; ``ahead``: the input that it multiplies at position 0.
    """

    first: int
    count: int
    taps: int
    ahead: int


@dataclass(frozen=True)
class _Axis:
    """A transposed convolution along one axis.

    ``extra``: torch's ``output_padding``; ``gap``: its dilation. ``cut``: elements that are computed before the
    first one of the result.
    """

    kernel: int
    stride: int
    padding: int
    extra: int
    gap: int
    cut: int

    @property
    def runs(self) -> list[_PhaseRun]:
        """All phases, in order."""
        start = self.padding - self.cut
        phases = [divmod(i + start, self.stride) for i in range(self.stride)]
        each = [(ahead, -(-(self.kernel - r) // self.stride), r) for ahead, r in phases]
        runs = ([*run] for _, run in groupby(each, key=lambda phase: phase[:2]))
        return [_PhaseRun(run[0][2], len(run), run[0][1], run[0][0]) for run in runs]

    @property
    def growth(self) -> int:
        """Positions beyond the number of inputs."""
        return (self._least + self.cut) // self.stride

    @property
    def least_size(self) -> int:
        """The number of inputs from which on the result is not empty."""
        return max(1, 1 - self._least // self.stride)

    def borders(self, run: _PhaseRun) -> tuple[int, int]:
        """The padding at the beginning and the end for the convolution of ``run``; less than 0 cuts inputs off."""
        before = self.gap * (run.taps - 1) - run.ahead
        return before, self.growth + run.ahead

    @property
    def is_served(self) -> bool:
        """Whether every phase has a tap, and evenly spaced ones."""
        return self.kernel >= self.stride and 1 in (self.gap, self.stride)

    @property
    def _least(self) -> int:
        """The last element of the result of one input, counted from 0."""
        return self.gap * (self.kernel - 1) - 2 * self.padding + self.extra


def conv_by_phases(
    lo: Lowering, x: Value, weight: Value, bias: Value | None, given: Sequence[Sequence[int]]
) -> Value:
    """The transposed convolution of ``x`` with the constant ``weight`` [C, O, *kernel].

    ``given``: stride, padding, output_padding and dilation, one number per axis.
    """
    spatial = len(weight.shape) - 2
    tensors = [t for t in (x, weight, bias) if t is not None]
    if parts_of(weight) is None or lo.dtype not in lo.forms.transposed:
        raise lo.otherwise()
    if any(t.dtype != lo.dtype for t in tensors) or not isinstance(x.shape[-spatial - 1], int):
        raise lo.otherwise()
    axes = _axes(weight, given)
    if not all(a.is_served for a in axes) or math.prod(a.stride for a in axes) > _MOST_PHASES:
        raise lo.otherwise()
    for size, axis in zip(x.shape[-spatial:], axes, strict=True):
        lo.at_least(size, axis.least_size, "a result that is not empty")
    batched = len(x.shape) == spatial + 2
    images = x if batched else lo.b.reshape(x, (1, *x.shape))
    shape = lo.shape if batched else (1, *lo.shape)
    images = lo.b.permute(images, to_channels_last(len(shape)))
    parts = [_convolved(lo, images, weight, axes, r) for r in product(*(a.runs for a in axes))]
    y = _interleaved(lo, parts, axes)
    for k, axis in enumerate(axes, 1):
        y = lo.b.slice(y, k, axis.cut, 1, shape[k + 1])
    if bias is not None:
        y = lo.b.pointwise("add", y, lo.b.broadcast(lo.b.cast(bias, y.dtype), y.shape))
    y = lo.b.permute(lo.b.cast(y, lo.dtype), to_channels_first(len(shape)))
    return lo.b.reshape(y, lo.shape)


def least_sizes(weight: Value, given: Sequence[Sequence[int]]) -> list[int]:
    """The sizes of an input, per axis, from which on the result is not empty."""
    return [axis.least_size for axis in _axes(weight, given)]


def _axes(weight: Value, given: Sequence[Sequence[int]]) -> list[_Axis]:
    """With a cut all phases begin at the same input: fewer and larger convolutions, of one position more.

    That is little along one axis, and in images less than vectors that are filled in part.
    """
    cuts = len(weight.shape) == 3 or int(weight.shape[1]) < _FEW
    each = zip(weight.shape[2:], *given, strict=True)
    return [_Axis(int(k), s, p, extra, gap, p % s if cuts else 0) for k, s, p, extra, gap in each]


def _convolved(
    lo: Lowering, x: Value, weight: Value, axes: Sequence[_Axis], runs: Sequence[_PhaseRun]
) -> Value:
    """The phases of ``runs``, one run per axis: [N, position, phase, position, phase, .., O]."""
    b, (depth, columns) = lo.b, weight.shape[:2]
    taps = [run.taps for run in runs]
    walks = (((1, 1),), ((0, 1),), *(((k, -a.stride),) for k, a in enumerate(axes, 2)))
    pieces = []
    for phase in product(*(range(run.first, run.first + run.count) for run in runs)):
        last = [r + (n - 1) * a.stride for r, n, a in zip(phase, taps, axes, strict=True)]
        how = {"starts": (0, 0, *last), "walks": walks}
        pieces.append(b.make("window", (weight,), (columns, depth, *taps), weight.dtype, **how))
    kernels = _concatenated(lo, pieces, 0)
    borders = [a.borders(run) for a, run in zip(axes, runs, strict=True)]
    sizes = zip(x.shape[1:-1], axes, strict=True)
    positions = [plain(sympy.sympify(size) + a.growth) for size, a in sizes]
    y = b.make(
        "conv",
        (x, kernels),
        (x.shape[0], *positions, kernels.shape[0]),
        torch.float32,
        stride=(1,) * len(axes),
        padding=tuple(before for before, _ in borders),
        dilation=tuple(a.gap for a in axes),
        groups=1,
        activation=None,
        transposed=False,
        trailing=tuple(after for _, after in borders),
    )
    spatial = len(axes)
    y = b.reshape(y, (x.shape[0], *positions, *(run.count for run in runs), columns))
    pairs = [k for axis in range(1, spatial + 1) for k in (axis, axis + spatial)]
    return b.permute(y, (0, *pairs, 2 * spatial + 1))


def _interleaved(lo: Lowering, parts: Sequence[Value], axes: Sequence[_Axis]) -> Value:
    """``parts``, one for each choice of runs, as one image [N, *(positions * stride), O]."""
    found = list(parts)
    for k in reversed(range(len(axes))):
        count = len(axes[k].runs)
        groups = [found[i : i + count] for i in range(0, len(found), count)]
        found = [_concatenated(lo, group, 2 * k + 2) for group in groups]
    [y] = found
    sizes = [plain(sympy.sympify(n) * a.stride) for n, a in zip(y.shape[1:-1:2], axes, strict=True)]
    return lo.b.reshape(y, (y.shape[0], *sizes, y.shape[-1]))


def _concatenated(lo: Lowering, parts: Sequence[Value], axis: int) -> Value:
    """``parts`` along ``axis``, of known sizes."""
    sizes: list[Dim] = list(parts[0].shape)
    sizes[axis] = sum(int(p.shape[axis]) for p in parts)
    return lo.b.make("concat", parts, sizes, parts[0].dtype, axis=axis)

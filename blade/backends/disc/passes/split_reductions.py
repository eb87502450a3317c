# SPDX-License-Identifier: Apache-2.0
"""Splits a reduction over several axes into two steps if one kernel would be slow.

    %2 = reduce %1 {sum, axes=(0, 2, 3)}            [N, C, H, W]: images, channels first
                                    ->
    %2 = reduce %1 {sum, axes=(2, 3)}               rows of pixels, N * C of them
    %3 = reduce %2 {sum, axes=(0,)}

A kernel reduces one contiguous run of axes, so of separated axes the last run is reduced first. A reduction over
everything would be a single row, one unit of work; one over the leading axes would leave only a few columns to share
among threads. In both cases the last reduced axis goes first. Partial sums are shorter, so the result is no less exact.
"""

from collections.abc import Sequence

from blade.backends.disc.frontend.ops.reduction import wide
from blade.backends.disc.ir.graph import Graph, IrBuilder, Shape, Value, numel
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.passes.column_pieces import pieces_of

_SHORT = 16  # elements of a row too short for a separate step
_WIDE = 512  # columns that keep all threads busy


def split_reductions(graph: Graph, pieces: bool = False) -> Graph:
    """``graph`` with reductions over several axes split into steps.

    ``pieces``: reduce_last_axis.py divides columns that it can, so they stay whole.
    """

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "reduce" or (pieces and pieces_of(args[0].shape, v.attrs["axes"])):
            return None
        x, kind = args[0], v.attrs["kind"]
        axes = [a for a in v.attrs["axes"] if x.shape[a] != 1]
        run = _last_run(x.shape, axes)
        if len(run) < len(axes):
            first, rest = run, axes[: len(axes) - len(run)]
        elif _is_narrow(x.shape, axes):
            first, rest = axes[-1:], axes[:-1]
        else:
            return None
        if kind in ("sum", "prod"):  # partial results neither overflow nor lose digits
            x = b.cast(x, wide(x.dtype))
        return b.cast(b.reduce(kind, b.reduce(kind, x, first), rest), v.dtype)

    return rewrite_values(graph, step)


def _last_run(shape: Shape, axes: Sequence[int]) -> list[int]:
    """The last adjacent axes of ``axes``."""
    run = list(axes[-1:])
    for a in reversed(axes[:-1]):
        if any(d != 1 for d in shape[a + 1 : run[0]]):
            break
        run.insert(0, a)
    return run


def _is_narrow(shape: Shape, axes: Sequence[int]) -> bool:
    """Whether a reduction over ``axes``, one run, leaves too little parallel work."""
    if len(axes) < 2 or any(d != 1 for d in shape[: axes[0]]):
        return False
    last, columns = shape[axes[-1]], numel(shape[axes[-1] + 1 :])
    if isinstance(last, int) and last < _SHORT:
        return False
    return not isinstance(columns, int) or columns < _WIDE

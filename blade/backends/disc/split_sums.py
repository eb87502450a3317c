# SPDX-License-Identifier: Apache-2.0
"""A sum over several axes is taken in two steps where one kernel would be slow at it.

    %2 = reduce %1 {sum, axes=(0, 2, 3)}            [N, C, H, W]: images, channels first
                                    ->
    %2 = reduce %1 {sum, axes=(2, 3)}               rows of pixels, N * C of them
    %3 = reduce %2 {sum, axes=(0,)}

A kernel reduces one run of memory. Axes that are apart are not one, so the last of them are summed first.
Nor may everything be one row, which is a single unit of work, and neither may the leading axes be, when
all that is left to share among threads is a few columns: the last of these axes goes first. Partial sums
are shorter, so the result is no further from the exact one.
"""

from collections.abc import Sequence

from blade.backends.disc.ir import Builder, Graph, Shape, Value, numel
from blade.backends.disc.rebuild import rebuild

_SHORT = 16  # elements of a row that is not worth a step of its own
_WIDE = 512  # columns that keep all threads busy


def split_sums(graph: Graph) -> Graph:
    """``graph`` with sums over several axes in steps."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "reduce" or v.attrs["kind"] != "sum":
            return None
        x = args[0]
        axes = [a for a in v.attrs["axes"] if x.shape[a] != 1]
        run = _last_run(x.shape, axes)
        if len(run) < len(axes):
            x, axes = b.reduce("sum", x, run), axes[: len(axes) - len(run)]
        elif _is_narrow(x.shape, axes):
            x, axes = b.reduce("sum", x, axes[-1:]), axes[:-1]
        else:
            return None
        return b.reduce("sum", x, axes)

    return rebuild(graph, step)


def _last_run(shape: Shape, axes: Sequence[int]) -> list[int]:
    """The last of ``axes`` that have no other axis between them."""
    run = list(axes[-1:])
    for a in reversed(axes[:-1]):
        if any(d != 1 for d in shape[a + 1 : run[0]]):
            break
        run.insert(0, a)
    return run


def _is_narrow(shape: Shape, axes: Sequence[int]) -> bool:
    """Would a sum over ``axes``, one run, leave too little to do at once?"""
    if len(axes) < 2 or any(d != 1 for d in shape[: axes[0]]):
        return False
    last, columns = shape[axes[-1]], numel(shape[axes[-1] + 1 :])
    if isinstance(last, int) and last < _SHORT:
        return False
    return not isinstance(columns, int) or columns < _WIDE

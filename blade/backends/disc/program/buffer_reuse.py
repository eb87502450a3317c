# SPDX-License-Identifier: Apache-2.0
"""Buffer reuse: a kernel may write its result over a buffer whose last read it is.

    h = exp(x @ w)          slot 4 arena f32 2 0 1 reuse 3

All generated code reads what a point, and the whole row around it, needs before it stores to that point
(kernel_schedule.py: stores come last). So a buffer that is read only at the point being stored is free
once the store happens. This is a property of the kernel (``overwritable``). Whether anything else reads
the buffer later is a property of the program (``Liveness``).
"""

from collections.abc import Callable, Sequence

from blade.backends.disc.ir.graph import Value, numel
from blade.backends.disc.ir.kernel import (
    Access,
    Accessing,
    Kernel,
    Load,
    Store,
)
from blade.backends.disc.ir.views import equal


def overwritable(kernel: Kernel, buffers: Sequence[Value]) -> tuple[tuple[Value, Value], ...]:
    """Pairs (read, written) of ``buffers`` such that ``written`` may use the bytes of ``read``."""
    return tuple(
        (buffers[r], buffers[w])
        for w, written in enumerate(kernel.args)
        for r, read in enumerate(kernel.args)
        if written.written
        and not read.written
        and read.dtype.itemsize == written.dtype.itemsize
        and equal(numel(buffers[r].shape), numel(buffers[w].shape))
        and _point_by_point(kernel, r, w)
    )


def _point_by_point(kernel: Kernel, read: int, written: int) -> bool:
    """Whether ``written`` is only stored, once per point, and ``read`` only loaded from that same point."""
    touching = [s for s in kernel.body if isinstance(s, Accessing)]
    stores = [s for s in touching if s.access.arg == written]
    loads = [s for s in touching if s.access.arg == read]
    if len(stores) != 1 or type(stores[0]) is not Store:
        return False
    here = stores[0].access
    return all(isinstance(s, Load) and _same_place(s.access, here) for s in loads)


def _same_place(a: Access, b: Access) -> bool:
    return equal(a.offset, b.offset) and all(map(equal, a.strides, b.strides))


class Liveness:
    """The first and last instruction that touches each slot's own memory, recorded during writing."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.offers: list[tuple[int, int, int]] = []

    def touch(self, slot: int, at: int) -> None:
        """Record that instruction ``at`` (the current number of instructions) needs ``slot``."""
        self.first.setdefault(slot, at)
        self.last[slot] = at

    def span(self, first: int, last: int) -> None:
        """Instructions ``first`` to ``last`` are a loop: what is needed in it from before, or after it, is
        needed at each of its iterations.
        """
        for slot, end in self.last.items():
            if self.first[slot] < first <= end:
                self.last[slot] = max(end, last)

    def offer(self, read: int, written: int, at: int) -> None:
        """Record that instruction ``at`` may write slot ``written`` over slot ``read``."""
        self.offers.append((read, written, at))

    def may_take(self, slot: int, written: int) -> bool:
        """Whether nothing needs ``slot`` any more when ``written`` begins."""
        begins, last = self.first[written], self.last.get(slot, -1)
        return last < begins or (last == begins and (slot, written, begins) in self.offers)

    def reused(self, in_arena: Callable[[int], bool]) -> dict[int, int]:
        """Slot -> the slot whose bytes it takes, which dies where it begins. Each slot is taken at
        most once.
        """
        taken: dict[int, int] = {}
        for read, written, at in self.offers:
            if not (in_arena(read) and in_arena(written)):
                continue
            dies = self.last[read] == at and read not in taken.values()
            if dies and self.first[written] == at and written not in taken:
                taken[written] = read
        return taken

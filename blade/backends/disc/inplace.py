# SPDX-License-Identifier: Apache-2.0
"""Which buffers of a program take the bytes of one that dies: a kernel may write over what it reads.

    h = exp(x @ w)          slot 4 arena f32 2 0 1 reuse 3

Every emitter's code reads what a point, and the whole row it lies in, needs before it stores to that
point (cpu/passes.py: stores come last). So a buffer that is read only where the same point is stored
is no longer needed once the store happens. That is a property of the kernel (``overwritable``); that
nothing else reads the buffer later is one of the program (``Lives``).
"""

from collections.abc import Callable, Sequence

from blade.backends.disc.ir import Value, numel
from blade.backends.disc.kernel import Access, Accessing, Kernel, Load, Store
from blade.backends.disc.views import equal


def overwritable(kernel: Kernel, buffers: Sequence[Value]) -> tuple[tuple[Value, Value], ...]:
    """Pairs (read, written) of ``buffers``: ``written`` may lie in the very bytes of ``read``."""
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
    """Is ``written`` only stored, once a point, and ``read`` only loaded from that same place?"""
    touching = [s for s in kernel.body if isinstance(s, Accessing)]
    stores = [s for s in touching if s.access.arg == written]
    loads = [s for s in touching if s.access.arg == read]
    if len(stores) != 1 or not isinstance(stores[0], Store):
        return False
    here = stores[0].access
    return all(isinstance(s, Load) and _same_place(s.access, here) for s in loads)


def _same_place(a: Access, b: Access) -> bool:
    return equal(a.offset, b.offset) and all(map(equal, a.strides, b.strides))


class Lives:
    """First and last instruction that touches each slot's own memory, noted while a program is written."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.offers: list[tuple[int, int, int]] = []

    def touch(self, slot: int, at: int) -> None:
        """Instruction ``at`` (the number of instructions: the caller) needs ``slot``."""
        self.first.setdefault(slot, at)
        self.last[slot] = at

    def offer(self, read: int, written: int, at: int) -> None:
        """Instruction ``at`` may write slot ``written`` over slot ``read``."""
        self.offers.append((read, written, at))

    def may_take(self, slot: int, written: int) -> bool:
        """Whether nothing needs ``slot`` any more where ``written`` begins."""
        begins, last = self.first[written], self.last.get(slot, -1)
        return last < begins or (last == begins and (slot, written, begins) in self.offers)

    def reused(self, in_arena: Callable[[int], bool]) -> dict[int, int]:
        """Slot -> the slot that dies where it begins, whose bytes it takes. Each is taken once."""
        taken: dict[int, int] = {}
        for read, written, at in self.offers:
            if not (in_arena(read) and in_arena(written)):
                continue
            dies = self.last[read] == at and read not in taken.values()
            if dies and self.first[written] == at and written not in taken:
                taken[written] = read
        return taken

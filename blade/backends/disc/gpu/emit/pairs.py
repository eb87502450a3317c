# SPDX-License-Identifier: Apache-2.0
"""Accesses of every other element whose neighbours are accessed, too: both are one access of whole rows.

    load a[2 * c], load a[2 * c + 1]        ->        two = load(a[c], twice as many columns); split(two)

Rotary embeddings of pairs of numbers read and write so. Apart, each access takes two bytes of every four.
"""

from collections.abc import Iterator

from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import Access, Kernel, Load, Stmt, Store
from blade.backends.disc.ir.kernel_schedule import live


def find_pairs(kernel: Kernel) -> dict[int, tuple[int, int]]:
    """Statement -> the pair that it is of: the one at even places, the one at odd places."""
    found: dict[int, tuple[int, int]] = {}
    for kind in (Load, Store):
        halves = [i for i in sorted(live(kernel.body)) if _is_half(kernel.body[i], kind)]
        for even in halves:
            odd = next((i for i in halves if _are_neighbours(kernel, even, i)), None)
            if odd is not None and even not in found and odd not in found:
                found[even] = found[odd] = (even, odd)
    return found


def paired_accesses(kernel: Kernel) -> Iterator[Access]:
    """The access at even places of every pair."""
    for even, _ in dict.fromkeys(find_pairs(kernel).values()):
        yield access_of(kernel, even)


def access_of(kernel: Kernel, i: int) -> Access:
    stmt = kernel.body[i]
    assert isinstance(stmt, (Load, Store)), stmt
    return stmt.access


def _is_half(stmt: Stmt, kind: type[Load] | type[Store]) -> bool:
    return isinstance(stmt, kind) and number(stmt.access.strides[-1]) == 2


def _are_neighbours(kernel: Kernel, even: int, odd: int) -> bool:
    one, other = access_of(kernel, even), access_of(kernel, odd)
    if (one.arg, one.strides) != (other.arg, other.strides):
        return False
    starts = (number(one.offset), number(other.offset))
    return None not in starts and starts[1] == starts[0] + 1 and starts[0] % 2 == 0  # type: ignore[operator]

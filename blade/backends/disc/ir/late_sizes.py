# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on elements: which value makes each one, and which values wait for it.

    %3 f32[u0] = call %0 %2               # masked_select makes u0
    %4 i64[u0] = iota axis=0              # reads nothing, and cannot be computed before %3

An op of the IR depends on the values that it reads and on those that make its sizes. Torch names such a
size ``u0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from blade.graph.shapes.symbolic import is_late

if TYPE_CHECKING:
    from blade.backends.disc.ir.graph import Value

_MAKES = ("call", "item", "read")


def makers(values: Iterable[Value]) -> dict[sympy.Symbol, Value]:
    """Late size -> the value that makes it: the first that has it, a result of a call or a number that is read."""
    found: dict[sympy.Symbol, Value] = {}
    for value in values:
        if value.op not in _MAKES:
            continue
        made = [value.attrs["symbol"]] if value.op == "read" else value.shape
        for size in [] if _has_items(value) else made:
            if isinstance(size, sympy.Symbol) and is_late(size):
                found.setdefault(size, value)
    return found


def late_operands(values: Sequence[Value]) -> dict[int, list[Value]]:
    """Value id -> values that make a size of it, for values that wait for any."""
    known = makers(values)
    if not known:
        return {}
    found: dict[int, list[Value]] = {}
    for value in values:
        if sizes := _sizes_of(value) & known.keys():
            found[value.id] = [known[s] for s in sorted(sizes, key=str)]
    return found


def depends_on_late(relation: sympy.Basic) -> bool:
    """Whether ``relation`` concerns a size that depends on elements."""
    return bool(late_symbols(relation))


def late_symbols(value: Any) -> set[sympy.Symbol]:
    """The sizes that depend on elements in ``value``, an expression or nested tuples of such."""
    return {s for e in _expressions(value) for s in e.free_symbols if is_late(s)}


def _has_items(value: Value) -> bool:
    """Whether the results of a call are values of their own (``item``)."""
    if value.op != "call":
        return False
    return [str(r.type) for r in value.attrs["target"]._schema.returns] != ["Tensor"]


def _sizes_of(value: Value) -> set[sympy.Symbol]:
    """Late sizes that have to be known before ``value`` is computed; those of its own results are not."""
    if value.op == "read":
        return set()
    attrs = tuple(value.attrs.values())
    return late_symbols(attrs if value.op in _MAKES else (attrs, value.shape))


def _expressions(value: Any) -> Iterator[sympy.Basic]:
    if isinstance(value, sympy.Basic):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _expressions(one)

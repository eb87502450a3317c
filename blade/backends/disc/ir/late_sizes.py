# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on elements: which value makes each one, and which values wait for it.

    %3 f32[u0] = call %0 %2               # masked_select makes u0
    %4 i64[u0] = iota axis=0              # reads nothing, and cannot be computed before %3

An op of the IR depends on the values that it reads and on those that make its sizes. Torch names such a
size ``u0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    found = {v.id: [known[s] for s in _sizes_of(v) if s in known] for v in values}
    return {k: made for k, made in found.items() if made}


def depends_on_late(relation: sympy.Basic) -> bool:
    """Whether ``relation`` concerns a size that depends on elements."""
    return any(map(is_late, relation.free_symbols))


def _has_items(value: Value) -> bool:
    """Whether the results of a call are values of their own (``item``)."""
    if value.op != "call":
        return False
    return [str(r.type) for r in value.attrs["target"]._schema.returns] != ["Tensor"]


def _sizes_of(value: Value) -> list[sympy.Symbol]:
    """Late sizes that have to be known before ``value`` is computed; those of its own results are not."""
    attrs = {k: v for k, v in value.attrs.items() if k != "symbol"}
    given: tuple[Any, ...] = tuple(attrs.values())
    if value.op not in _MAKES:
        given += (value.shape,)
    return list(dict.fromkeys(s for e in _expressions(given) for s in _late_symbols(e)))


def _late_symbols(expr: sympy.Basic) -> list[sympy.Symbol]:
    return sorted(filter(is_late, expr.free_symbols), key=str)


def _expressions(value: Any) -> Iterator[sympy.Basic]:
    if isinstance(value, sympy.Basic):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _expressions(one)
    elif isinstance(value, Mapping):
        yield from _expressions(tuple(value.values()))

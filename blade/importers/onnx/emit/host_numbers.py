# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on numbers of the host: computed now where both are known, else written as TorchScript.

    add(e, Number("n0"), 2)        # Number("n1"), after the line "n1 = n0 + 2"

Functions of one name take numbers; ``each`` applies them to arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.values import Array, HostNumber, Number


def each(function: Callable[..., HostNumber], e: Emitter, *arrays: Array) -> Array:
    """``function`` of each tuple of elements, broadcast as numpy does."""
    found = np.frompyfunc(lambda *one: function(e, *one), len(arrays), 1)(*arrays)
    result = np.empty(np.broadcast_shapes(*(one.shape for one in arrays)), dtype=object)
    result[...] = found
    return result


def is_known(*numbers: HostNumber) -> bool:
    return not any(isinstance(one, Number) for one in numbers)


def is_size(number: HostNumber) -> bool:
    """Whether ``number`` is known to be at least 0."""
    return number.is_size if isinstance(number, Number) else number >= 0


def add(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return a + b  # type: ignore[operator]
    if is_known(a) and a == 0:
        return b
    if is_known(b) and b == 0:
        return a
    return e.number(f"{a} + {b}", is_size=is_size(a) and is_size(b))


def sub(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return a - b  # type: ignore[operator]
    if is_known(b) and b == 0:
        return a
    return 0 if a == b else e.number(f"{a} - {_operand(b)}")


def mul(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return a * b  # type: ignore[operator]
    for one, other in ((a, b), (b, a)):
        if is_known(one) and one in (0, 1):
            return other if one == 1 else 0
    return e.number(f"{_operand(a)} * {_operand(b)}", is_size=is_size(a) and is_size(b))


def div(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    """Truncated division, as ONNX divides integers."""
    if is_known(b) and b == 1:
        return a
    if is_known(b) and b == 0:
        raise NotImported("An integer is divided by 0.")
    if is_known(a, b):
        quotient = abs(a) // abs(b)  # type: ignore[arg-type]
        return quotient if (a < 0) == (b < 0) else -quotient  # type: ignore[operator]
    if not (is_size(a) and is_size(b)):
        raise NotImported("A number that may be negative is divided.")
    return e.number(f"{a} // {b}", is_size=True)


def mod(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b) and b != 0:
        return a % b  # type: ignore[operator]
    return e.number(f"{_operand(a)} % {_operand(b)}", is_size=is_size(a) and is_size(b))


def minimum(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return min(a, b)  # type: ignore[type-var]
    return a if a == b else e.number(f"min({a}, {b})", is_size=is_size(a) and is_size(b))


def maximum(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return max(a, b)  # type: ignore[type-var]
    return a if a == b else e.number(f"max({a}, {b})", is_size=is_size(a) or is_size(b))


def neg(e: Emitter, a: HostNumber) -> HostNumber:
    return -a if not isinstance(a, Number) else e.number(f"-{a}")


def absolute(e: Emitter, a: HostNumber) -> HostNumber:
    if not isinstance(a, Number):
        return abs(a)
    return a if a.is_size else e.number(f"abs({a})", is_size=True)


def equal(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return bool(a == b)
    if a == b:
        return True
    for one, other in ((a, b), (b, a)):
        if is_known(one) and not is_size(one) and is_size(other):
            return False
    return e.number(f"{a} == {_operand(b)}", "bool")


def less(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    if is_known(a, b):
        return bool(a < b)  # type: ignore[operator]
    if is_known(b) and b <= 0 and is_size(a):  # type: ignore[operator]
        return False
    return False if a == b else e.number(f"{a} < {_operand(b)}", "bool")


def negation(e: Emitter, a: HostNumber) -> HostNumber:
    return e.number(f"not {a}", "bool") if isinstance(a, Number) else not a


def conjunction(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    for one, other in ((a, b), (b, a)):
        if is_known(one):
            return other if one else False
    return e.number(f"{a} and {b}", "bool")


def disjunction(e: Emitter, a: HostNumber, b: HostNumber) -> HostNumber:
    return negation(e, conjunction(e, negation(e, a), negation(e, b)))


def choose(e: Emitter, condition: HostNumber, a: HostNumber, b: HostNumber) -> HostNumber:
    if not isinstance(condition, Number):
        return a if condition else b
    if a == b:
        return a
    kind = "bool" if isinstance(a, bool) or getattr(a, "kind", "") == "bool" else "int"
    return e.number(f"{a} if {condition} else {b}", kind, is_size(a) and is_size(b))


def as_int(e: Emitter, a: HostNumber) -> HostNumber:
    if not isinstance(a, Number):
        return int(a)
    return a if a.kind == "int" else e.number(f"int({a})", is_size=True)


def as_bool(e: Emitter, a: HostNumber) -> HostNumber:
    if not isinstance(a, Number):
        return bool(a)
    return a if a.kind == "bool" else e.number(f"{a} != 0", "bool")


def _operand(number: HostNumber) -> str:
    return f"({number})" if is_known(number) and not is_size(number) else str(number)

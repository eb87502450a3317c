# SPDX-License-Identifier: Apache-2.0
"""What an int8 product does with its floats before they become bytes, as attributes of the product.

    %2 = int8_linear %q %w %s %b %r {residual=(0.02, 128), body=(add 0 1, ..), inverse, point, low, high}

``body``: statements of the kernel IR (`Const`, `Compute`), the last of which is what is stored; none: the
product itself. Value 0 is the product, value 1 the residual where there is one, then the statements count on.
``residual``: the last operand is one, in the result's shape: unsigned bytes that mean ``(r - zero) * scale``,
or floats, with (1, 0).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from blade.backends.disc.ir import LEAVES, Value
from blade.backends.disc.kernel import Compute, Const, Stmt

PRODUCTS = ("int8_linear", "int8_conv")
_MOST = 32  # statements
_STEPS = frozenset(
    "neg abs sign sqrt rsqrt reciprocal floor ceil round trunc maximum minimum add sub mul div fma where "
    "eq ne lt le gt ge logical_not logical_and logical_or isnan exp expm1 log log1p tanh erf sigmoid".split()
)
"""What a vector computes without a call."""


@dataclass(frozen=True)
class Absorbed:
    """A product and what comes after it; ``residual`` with its scale and zero point."""

    product: Value
    body: tuple[Stmt, ...]
    residual: tuple[Value, float, int] | None


def body_of(value: Value) -> tuple[Stmt, ...]:
    """The statements of an int8 product."""
    found: tuple[Stmt, ...] = value.attrs.get("body", ())
    return found


def has_residual(value: Value) -> bool:
    return "residual" in value.attrs


def residual_of(value: Value) -> Value | None:
    return value.args[-1] if has_residual(value) else None


def find(end: Value, users: dict[int, list[Value]], returned: set[int]) -> Absorbed | None:
    """The product that ``end`` is computed from by pointwise ops alone, with at most one other tensor."""
    if _is_product(end):
        return Absorbed(end, (), None)
    inner = _region(end, users, returned)
    inside = {v.id for v in inner}
    leaves = {a.id: a for v in inner for a in v.args if a.id not in inside and a.op != "fill"}
    products = [
        v
        for v in leaves.values()
        if _is_product(v) and len(v.args) == 4 and _only_read_in(inside, v, users, returned)
    ]
    if not products or len(leaves) > 2 or len(inner) > _MOST:
        return None
    product = max(products, key=lambda v: v.id)  # the other one is computed by then
    others = [v for v in leaves.values() if v is not product]
    residual = _residual(others[0], product) if others else None
    if others and residual is None:
        return None
    return Absorbed(product, _body(inner, [product, *others]), residual)


def dequantized(v: Value) -> tuple[Value, float, int] | None:
    """The bytes that ``v`` is made from by ``(q - zero) * scale``, with scale and zero point."""
    scale, v = _number(v, "mul")
    zero, v = _number(v, "sub")
    is_bytes = v.op == "cast" and v.args[0].dtype == torch.uint8
    if scale is None or not is_bytes or v.dtype != torch.float32:
        return None
    return v.args[0], scale, int(zero or 0)


def _number(v: Value, op: str) -> tuple[float | None, Value]:
    """The number that ``op`` has as its second operand, and its first one; else ``v`` itself."""
    if v.op != op or v.args[1].op != "fill":
        return None, v
    return float(v.args[1].attrs["value"]), v.args[0]


def _is_product(v: Value) -> bool:
    return v.op in PRODUCTS and v.dtype == torch.float32


def _only_read_in(
    inside: Collection[int], v: Value, users: dict[int, list[Value]], returned: set[int]
) -> bool:
    return v.id not in returned and all(u.id in inside for u in users[v.id])


def _region(end: Value, users: dict[int, list[Value]], returned: set[int]) -> list[Value]:
    """``end`` and the pointwise values that only it needs, producers first."""
    region: dict[int, Value] = {}
    waiting = {end.id: end}
    while waiting and len(region) <= _MOST:
        v = waiting.pop(max(waiting))
        is_step = v.op in _STEPS and v.dtype in (torch.float32, torch.bool)
        mine = v is end or _only_read_in(region, v, users, returned)
        if is_step and mine and dequantized(v) is None:
            region[v.id] = v
            waiting.update((a.id, a) for a in v.args)
    return list(region.values())[::-1]


def _residual(v: Value, product: Value) -> tuple[Value, float, int] | None:
    """How ``v``, of the product's shape, is read; it must be in memory as it is."""
    found = dequantized(v) or (v, 1.0, 0)
    stored = found[0]
    in_memory = not stored.is_layout and stored.op not in LEAVES
    is_read = stored.dtype in (torch.float32, torch.uint8)
    return found if in_memory and is_read and stored.shape == product.shape else None


def _body(inner: Sequence[Value], leaves: Sequence[Value]) -> tuple[Stmt, ...]:
    """``inner``, producers first, as statements."""
    number = {v.id: k for k, v in enumerate(leaves)}
    body: list[Stmt] = []

    def emit(v: Value, stmt: Stmt) -> None:
        number[v.id] = len(leaves) + len(body)
        body.append(stmt)

    for v in inner:
        for a in v.args:
            if a.id not in number:
                emit(a, Const(a.attrs["value"], a.dtype))
        emit(v, Compute(v.op, tuple(number[a.id] for a in v.args), v.dtype))
    return tuple(body)

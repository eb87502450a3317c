# SPDX-License-Identifier: Apache-2.0
"""The epilogue of an int8 product, float arithmetic before the result becomes bytes, as attributes.

    %2 = int8_linear %q %w %s %b %r {residual=(0.02, 128), body=(add 0 1, ..), inverse, point, low, high}

``body``: statements of the kernel IR (`Const`, `Compute`); the last one is stored. An empty body stores the
product itself. Value 0 is the product, value 1 the residual if there is one; statements are numbered from
there.
``residual``: (scale, zero) of the last operand, which has the result's shape: unsigned bytes that mean
``(r - zero) * scale``, or floats, with (1, 0).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from blade.backends.disc.ir.graph import LEAVES, Value
from blade.backends.disc.ir.kernel import Compute, Const, Stmt

PRODUCTS = ("int8_linear", "int8_conv")
_MOST = 32  # statements
_STEPS = frozenset(
    "neg abs sign sqrt rsqrt reciprocal floor ceil round trunc maximum minimum add sub mul div fma where "
    "eq ne lt le gt ge logical_not logical_and logical_or isnan exp expm1 log log1p tanh erf sigmoid".split()
)
"""Ops that vector code computes without a call."""


@dataclass(frozen=True)
class FusedEpilogue:
    """A product and the statements after it; ``residual`` with its scale and zero point."""

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


def find(end: Value, users: dict[int, list[Value]], returned: set[int]) -> FusedEpilogue | None:
    """The product and epilogue that compute ``end`` by pointwise ops, with at most one other tensor."""
    if _is_product(end):
        return FusedEpilogue(end, (), None)
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
    product = max(products, key=lambda v: v.id)  # the later one: the other is computed before it
    others = [v for v in leaves.values() if v is not product]
    residual = _residual(others[0], product) if others else None
    if others and residual is None:
        return None
    return FusedEpilogue(product, _body(inner, [product, *others]), residual)


def dequantized(v: Value) -> tuple[Value, float, int] | None:
    """(q, scale, zero) if ``v`` is ``(q - zero) * scale`` of bytes q; else ``None``."""
    scale, v = _number(v, "mul")
    zero, v = _number(v, "sub")
    is_bytes = v.op == "cast" and v.args[0].dtype == torch.uint8
    if scale is None or not is_bytes or v.dtype != torch.float32:
        return None
    return v.args[0], scale, int(zero or 0)


def _number(v: Value, op: str) -> tuple[float | None, Value]:
    """(number, first operand) if ``v`` is ``op`` with a number as second operand; else (None, ``v``)."""
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
    """``end`` and the pointwise values that only it depends on, producers first."""
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
    """``v`` as a residual (stored value, scale, zero); ``None`` unless it is in memory at the
    product's shape.
    """
    found = dequantized(v) or (v, 1.0, 0)
    stored = found[0]
    in_memory = not stored.is_layout and stored.op not in LEAVES
    is_read = stored.dtype in (torch.float32, torch.uint8)
    return found if in_memory and is_read and stored.shape == product.shape else None


def _body(inner: Sequence[Value], leaves: Sequence[Value]) -> tuple[Stmt, ...]:
    """The values ``inner``, producers first, as statements."""
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

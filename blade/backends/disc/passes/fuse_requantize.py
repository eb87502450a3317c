# SPDX-License-Identifier: Apache-2.0
"""Fuses the quantization of an int8 product's result, and pointwise ops before it, into the product.

    %2 = int8_conv ..                               %2 u8 = int8_conv .. %r {residual, body, inverse, point, low, high}
    %3 = add %2 (dequantize %r)
    %4 = maximum %3 0
    %5 = mul %4 inverse; round; + point     ->
    %6 = cast (minimum (maximum %5 low) high)

Quantization is monotonic, so a clamp before it becomes a clamp of bytes, by the quantized bounds. Other
pointwise ops before it, such as an activation or the addition of a residual, become statements of the
product (int8_epilogue.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.int8_epilogue import PRODUCTS, FusedEpilogue, find
from blade.backends.disc.ir.rewrite import rewrite_values


def fuse_requantize(graph: Graph) -> Graph:
    """``graph`` with products that return bytes wherever all their readers want bytes."""
    if not any(v.op in PRODUCTS for v in graph.values):
        return graph
    users, returned = graph.users(), {v.id for v in graph.outputs}
    new: dict[int, Value] = {}

    def is_free(v: Value) -> bool:
        return len(users[v.id]) == 1 and v.id not in returned

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        new.update((a.id, made) for a, made in zip(v.args, args, strict=True))
        chain = _RequantizeChain(v, is_free)
        numbers = chain.numbers()
        found = None if numbers is None else find(chain.at, users, returned)
        return None if found is None or numbers is None else _made(b, v, found, numbers, new)

    return rewrite_values(graph, step)


def _made(
    b: IrBuilder, v: Value, found: FusedEpilogue, numbers: dict[str, float], new: dict[int, Value]
) -> Value:
    """The product that returns the bytes ``v``."""
    product = found.product
    operands = [new[a.id] for a in product.args]
    attrs = {**product.attrs, **numbers}
    if found.body:
        attrs["body"] = found.body
    if found.residual is not None:
        stored, scale, zero = found.residual
        operands.append(new[stored.id])
        attrs["residual"] = (scale, zero)
    return b.make(product.op, operands, v.shape, v.dtype, **attrs)


@dataclass
class _RequantizeChain:
    """Walks from ``at`` along first operands, through values with one reader."""

    at: Value
    is_free: Callable[[Value], bool]
    steps: int = 0

    def numbers(self) -> dict[str, float] | None:
        """The parameters of ``clamp(round(y * inverse) + point, low, high)`` if the chain computes that as
        bytes.
        """
        shift = 0
        if self.at.dtype != torch.uint8 or self.at.op != "cast":
            return None
        if self.at.args[0].op == "bitwise_xor":  # int8 converted to uint8
            self.advance()
            if self.take("bitwise_xor") != -128 or not self.is_free(self.at):
                return None
            shift = 128
        if self.at.op != "cast" or self.at.args[0].dtype != torch.float32:
            return None
        self.advance()
        high, low = self.take("minimum"), self.take("maximum")
        point = self.take("add") or 0
        if high is None or low is None or self.at.op != "round" or not self.is_free(self.at):
            return None
        self.advance()
        inverse = self.take("mul")
        if inverse is None or self.at.dtype != torch.float32:
            return None
        most, least = self.take("minimum"), self.take("maximum")
        high = high if most is None else min(high, _quantized(most, inverse, point))
        low = low if least is None else max(low, _quantized(least, inverse, point))
        if low > high or not self.is_free(self.at):
            return None
        return {
            "inverse": inverse,
            "point": point + shift,
            "low": low + shift,
            "high": high + shift,
        }

    def take(self, op: str) -> float | None:
        """The number that is the second operand if ``op`` comes next in the chain; then step past it."""
        v = self.at
        if v.op != op or v.args[1].op != "fill" or not self.is_free(v):
            return None
        self.advance()
        return float(v.args[1].attrs["value"])

    def advance(self) -> None:
        self.at, self.steps = self.at.args[0], self.steps + 1


def _quantized(bound: float, inverse: float, point: float) -> float:
    """The quantized value of a bound, in the arithmetic of its type."""
    y = torch.tensor(bound, dtype=torch.float32) * torch.tensor(inverse, dtype=torch.float32)
    return float(torch.round(y) + point)

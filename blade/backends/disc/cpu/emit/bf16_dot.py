# SPDX-License-Identifier: Apache-2.0
"""Dot products of bfloat16, two per 32-bit lane, summed in float32, by the instructions that a target has.

    acc[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]

dpbf16  ``vdpbf16ps``: one instruction, twice the products of an FMA. It flushes denormal numbers to zero, as does
        ``tdpbf16ps``, its counterpart on matrix tiles.
widen   a bfloat16 is the upper half of a float32: a shift, a mask, two FMAs. For any machine.
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.emit.element_types import encode
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.cpu.emit.unit_dot import UnitDot
from blade.backends.disc.target.cpu import CpuTarget

PAIR = 2
"""Elements per lane."""

_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
_TILE_DOT = "tdpbf16ps"
_NARROW = "llvm.x86.avx512bf16.cvtneps2bf16.512"
_UPPER = -0x10000


@dataclass(frozen=True)
class Bf16Dot(UnitDot):
    """A target's way to multiply bfloat16."""

    def nothing(self, code: MlirBuilder) -> SsaValue:
        """A vector of empty sums."""
        return code.constant(0.0, "f32", self.lanes)

    def spread(self, code: MlirBuilder, unit: SsaValue) -> tuple[SsaValue, ...]:
        """A pair of ``a`` (an i32) broadcast to every lane, in the form that ``add`` takes."""
        return self.widened(code, code.broadcast(unit, self.lanes))

    def widened(self, code: MlirBuilder, units: SsaValue) -> tuple[SsaValue, ...]:
        """A pair in every lane (a vector of i32), in the form that ``add`` takes."""
        if self.how == "dpbf16":
            return (units,)
        low = code.apply("arith.shli", units, code.like(16, units))
        high = code.apply("arith.andi", units, code.like(_UPPER, units))
        return code.from_bits(low), code.from_bits(high)

    def add(
        self, code: MlirBuilder, acc: SsaValue, a: tuple[SsaValue, ...], b: tuple[SsaValue, ...]
    ) -> SsaValue:
        """``acc`` plus the products of ``a`` and ``b``."""
        if self.how == "dpbf16":
            kind = f"vector<{PAIR * self.lanes}xbf16>"
            parts = [
                code.op(f"vector.bitcast {x.name} : {x.type} to {kind}", "bf16", PAIR * self.lanes)
                for x in (*a, *b)
            ]
            names = ", ".join(p.name for p in (acc, *parts))
            types = f"({acc.type}, {kind}, {kind}) -> {acc.type}"
            return code.op(f'llvm.call_intrinsic "{_DOT}"({names}) : {types}', "f32", self.lanes)
        for x, y in zip(a, b, strict=True):
            acc = code.fma(x, y, acc)
        return acc

    def narrowed(self, code: MlirBuilder, x: SsaValue) -> SsaValue:
        """A vector of float32 rounded to bfloat16, as i16."""
        if self.how != "dpbf16":
            return encode(code, x, torch.bfloat16)
        kind = f"vector<{self.lanes}xbf16>"
        call = f'llvm.call_intrinsic "{_NARROW}"({x.name}) : ({x.type}) -> {kind}'
        half = code.op(call, "bf16", self.lanes)
        return code.convert("vector.bitcast", half, "i16")


def bf16_dot(target: CpuTarget) -> Bf16Dot:
    """The best variant for ``target``, with tiles that fit its registers."""
    if target.has_bf16_tiles:
        return Bf16Dot("dpbf16", 16, 2, 8, _TILE_DOT)
    if target.has_bf16_products:
        return Bf16Dot("dpbf16", 16, 4, 6)
    if target.registers == 32:
        return Bf16Dot("widen", target.lanes, 2, 8)
    return Bf16Dot("widen", target.lanes, 2, 4)


def paired(code: MlirBuilder, low: SsaValue, high: SsaValue) -> SsaValue:
    """Words of two 16-bit numbers each."""
    a, b = (code.convert("arith.extui", x, "i32") for x in (low, high))
    return code.apply("arith.ori", a, code.apply("arith.shli", b, code.like(16, b)))


def adjacent_pairs(f: MlirFunction, address: SsaValue, lanes: int) -> SsaValue:
    """Adjacent pairs as words."""
    x = f.load(address, PAIR * lanes, "i16")
    return f.op(f"vector.bitcast {x.name} : {x.type} to vector<{lanes}xi32>", "i32", lanes)

# SPDX-License-Identifier: Apache-2.0
"""Dot products of bytes, four per 32-bit lane, by the instructions that a target has.

    acc[i] += sum(a[4 * i + j] * b[4 * i + j] for j in range(4))        a unsigned, b signed

vnni    ``vpdpbusd``: one instruction; ``tdpbusd`` on matrix tiles.
sdot    Arm's, for signed bytes: ``a`` is replaced by ``a - 128`` (``offset``); the caller corrects the sums.
madd    ``vpmaddwd`` on the even and on the odd bytes widened to 16 bits. Exact: 2 * 255 * 128 fits, where
        ``vpmaddubsw`` would saturate.
plain   shifts and 32-bit products, for any machine.

All give the same integers if the sum itself fits into 32 bits.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.unit_dot import UnitDot
from blade.backends.disc.target.cpu import CpuTarget

QUAD = 4
"""Bytes per lane."""

_VNNI = {16: "llvm.x86.avx512.vpdpbusd.512", 8: "llvm.x86.avx512.vpdpbusd.256"}
_MADD = {
    16: "llvm.x86.avx512.pmaddw.d.512",
    8: "llvm.x86.avx2.pmadd.wd",
    4: "llvm.x86.sse2.pmadd.wd",
}
_TILE_DOT = "tdpbusd"
_SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"


@dataclass(frozen=True)
class Int8Dot(UnitDot):
    """A target's way to multiply bytes."""

    @property
    def offset(self) -> int:
        """The number that is subtracted from every ``a``."""
        return 128 if self.how == "sdot" else 0

    def nothing(self, code: MlirBuilder) -> SsaValue:
        """A vector of empty sums."""
        return code.constant(0, "i32", self.lanes)

    def spread(self, code: MlirBuilder, unit: SsaValue) -> tuple[SsaValue, ...]:
        """Four bytes of ``a`` (an i32) broadcast to every lane, in the form that ``add`` takes."""
        a = code.broadcast(unit, self.lanes)
        if self.how == "sdot":
            return (_as(code, code.apply("arith.xori", a, code.like(-0x7F7F7F80, a)), "i8"),)
        if self.how == "madd":
            low = code.like(0x00FF00FF, a)
            odd = code.apply("arith.shrui", a, code.like(8, a))
            parts = (code.apply("arith.andi", x, low) for x in (a, odd))
            return tuple(_as(code, x, "i16") for x in parts)
        if self.how == "vnni":
            return (_as(code, a, "i8"),)
        low = code.like(0xFF, a)
        parts = (code.apply("arith.shrui", a, code.like(8 * j, a)) for j in range(QUAD))
        return tuple(code.apply("arith.andi", x, low) for x in parts)

    def widened(self, code: MlirBuilder, units: SsaValue) -> tuple[SsaValue, ...]:
        """Four bytes of ``b`` in every lane (a vector of i32), in the form that ``add`` takes."""
        if self.how == "madd":
            pairs = _as(code, units, "i16")
            by = code.like(8, pairs)
            even = code.apply("arith.shrsi", code.apply("arith.shli", pairs, by), by)
            return even, code.apply("arith.shrsi", pairs, by)
        if self.how != "plain":
            return (_as(code, units, "i8"),)
        top = code.like(24, units)
        parts = (
            units if j == 3 else code.apply("arith.shli", units, code.like(24 - 8 * j, units))
            for j in range(QUAD)
        )
        return tuple(code.apply("arith.shrsi", x, top) for x in parts)

    def add(
        self, code: MlirBuilder, acc: SsaValue, a: tuple[SsaValue, ...], b: tuple[SsaValue, ...]
    ) -> SsaValue:
        """``acc`` plus the products of ``a`` and ``b``."""
        if self.how == "vnni":
            return _intrinsic(code, _VNNI[self.lanes], (acc, *a, *b), acc)
        if self.how == "sdot":
            return _intrinsic(code, _SDOT, (acc, *b, *a), acc)
        for x, y in zip(a, b, strict=True):
            if self.how == "madd":
                product = _intrinsic(code, _MADD[self.lanes], (x, y), acc)
            else:
                product = code.mul(x, y)
            acc = code.add(acc, product)
        return acc


def int8_dot(target: CpuTarget) -> Int8Dot:
    """The best variant for ``target``, with tiles that fit its registers."""
    isa, lanes = target.isa, target.lanes
    if target.has_int8_tiles:
        return Int8Dot("vnni", 16, 2, 8, _TILE_DOT)
    if lanes == 16 and "avx512_vnni" in isa:
        return Int8Dot("vnni", 16, 4, 6)
    if lanes == 8 and ("avx_vnni" in isa or {"avx512_vnni", "avx512vl"} <= set(isa)):
        return Int8Dot("vnni", 8, 2, 6)
    if lanes == 4 and "asimddp" in isa:
        return Int8Dot("sdot", 4, 4, 6)
    has_madd = {16: "avx512bw", 8: "avx2", 4: "sse4_1"}[lanes] in isa
    return Int8Dot("madd" if has_madd else "plain", lanes, 4 if lanes == 16 else 2, 4)


def _as(code: MlirBuilder, x: SsaValue, element: str) -> SsaValue:
    """Bitcast to elements of another size."""
    lanes = x.lanes * int(x.element[1:]) // int(element[1:])
    text = f"vector.bitcast {x.name} : {x.type} to vector<{lanes}x{element}>"
    return code.op(text, element, lanes)


def _intrinsic(
    code: MlirBuilder, name: str, args: tuple[SsaValue, ...], like: SsaValue
) -> SsaValue:
    names, types = ", ".join(a.name for a in args), ", ".join(a.type for a in args)
    text = f'llvm.call_intrinsic "{name}"({names}) : ({types}) -> {like.type}'
    return code.op(text, like.element, like.lanes)

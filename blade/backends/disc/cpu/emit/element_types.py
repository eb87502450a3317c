# SPDX-License-Identifier: Apache-2.0
"""Element types in memory and in registers, and the conversions between them.

bool is one byte 0/1 in memory and i1 in registers; bf16 and f16 are computed as f32.
"""

import torch

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue

MEMORY = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "i16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.bool: "i8",
}
REGISTER = {
    **MEMORY,
    torch.bfloat16: "f32",
    torch.float16: "f32",
    torch.bool: "i1",
}


def decode(code: MlirBuilder, raw: SsaValue, dtype: torch.dtype) -> SsaValue:
    """From memory type to register type."""
    if dtype == torch.bool:
        return code.compare("ne", raw, code.like(0, raw))
    if dtype == torch.bfloat16:
        wide = code.convert("arith.extui", raw, "i32")
        return code.from_bits(code.apply("arith.shli", wide, code.like(16, wide)))
    return code.convert("arith.extf", raw, "f32") if dtype == torch.float16 else raw


def encode(code: MlirBuilder, value: SsaValue, dtype: torch.dtype) -> SsaValue:
    """From register type to memory type; bf16 and f16 round to nearest even."""
    if dtype == torch.bool:
        return code.convert("arith.extui", value, "i8")
    if dtype == torch.bfloat16:
        bits = _round_to_bf16(code, value)
        return code.convert(
            "arith.trunci", code.apply("arith.shrui", bits, code.like(16, bits)), "i16"
        )
    return code.convert("arith.truncf", value, "f16") if dtype == torch.float16 else value


def round_to(code: MlirBuilder, value: SsaValue, dtype: torch.dtype) -> SsaValue:
    """A float32 register value rounded to the precision of ``dtype``, still in float32."""
    if dtype == torch.bfloat16:
        bits = _round_to_bf16(code, value)
        return code.from_bits(code.apply("arith.andi", bits, code.like(-65536, bits)))
    if dtype == torch.float16:
        return decode(code, encode(code, value, dtype), dtype)
    return value


def _round_to_bf16(code: MlirBuilder, value: SsaValue) -> SsaValue:
    """Bits whose upper half is the rounded value (the lower half is undefined); NaN stays NaN."""
    bits = code.bits(value)
    upper = code.apply("arith.shrui", bits, code.like(16, bits))
    even = code.apply("arith.andi", upper, code.like(1, bits))
    rounded = code.add(bits, code.add(even, code.like(0x7FFF, bits)))
    return code.select(code.compare("uno", value, value), code.like(0x7FC00000, bits), rounded)

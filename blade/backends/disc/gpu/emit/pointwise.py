# SPDX-License-Identifier: Apache-2.0
"""The table of pointwise ops: (op, kind of operand) -> Triton expression. ``supports`` reads it too.

``half`` values are loaded from and rounded to 16 bits. They are computed in float32 by fast division, root
and exponential, whose errors (2 ulp of float32) the rounding hides. An exponential or sigmoid below the
smallest normal float32 is 0. The number of instructions per element matters as much as its loads: with more
than about 25 instructions a kernel is slower than memory.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from blade.core.dtypes import HALVES
from blade.core.reason import Code
from blade.errors import Refused

KINDS: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "half",
    torch.float16: "half",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8",
    torch.int64: "int",
    torch.int32: "int",
    torch.int16: "int",
    torch.int8: "int",
    torch.uint8: "uint",
    torch.bool: "bool",
}
POINTERS: dict[torch.dtype, str] = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_NAMES = {torch.bool: "int1", torch.float8_e4m3fn: "float8e4nv"}
_LOG2_E = math.log2(math.e)
_FLOAT, _SINGLE, _INT = ("f32", "half", "f64"), ("f32", "half"), ("int", "uint")
_ALL = (*_FLOAT, *_INT, "bool")
_RULES: dict[tuple[str, str], str] = {}


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` on operands of ``dtype`` (``where``: of its branches) can be generated."""
    return dtype in KINDS and (op == "cast" or (op, KINDS[dtype]) in _RULES)


def memory_type(dtype: torch.dtype) -> str:
    """Triton's type name of an element in memory."""
    return f"tl.{_NAMES.get(dtype) or str(dtype).removeprefix('torch.')}"


def register_type(dtype: torch.dtype) -> str:
    """Triton's type name in which a value of ``dtype`` is computed."""
    return memory_type(torch.float32 if dtype in HALVES else dtype)


def compute(op: str, args: Sequence[str], source: torch.dtype) -> str:
    """The expression of ``op`` on named values; ``source`` is the dtype of the last operand."""
    if not supports(op, source):
        name = str(source).removeprefix("torch.")
        raise Refused(Code.UNSUPPORTED_DTYPE, f"The GPU emitter has no {op} for {name}.")
    return _RULES[op, KINDS[source]].format(*args)


def divided_by_row(x: str, divisor: str) -> str:
    """Half values of a row's columns divided by one row value, with one division per row."""
    return f"{x} * (1.0 / {divisor})"


def cast(x: str, source: torch.dtype, dtype: torch.dtype, exact: bool) -> str:
    """Conversion as in C and torch: truncation to ints, nonzero to bool.

    A half value may be more precise in its register than in memory; a cast takes the rounded value, unless
    the value is ``exact``, such as one just loaded. A result of 16 bits is also rounded.
    """
    if source == dtype:
        return x
    if source in HALVES and not exact:
        x = rounded(x, source)
    if dtype == torch.bool:
        return f"({x} != 0)"
    if source.is_floating_point and dtype in (torch.uint8, torch.int8, torch.int16):
        x = f"{x}.to(tl.int32)"
    if dtype not in HALVES:
        return f"{x}.to({memory_type(dtype)})"
    return rounded(f"{x}.to(tl.float32)", dtype)


def rounded(x: str, dtype: torch.dtype) -> str:
    """A float32 register with the value rounded to 16 bits."""
    return f"{x}.to({memory_type(dtype)}).to(tl.float32)"


def constant(value: float, dtype: torch.dtype) -> str:
    """A scalar of exactly this value; half types are not rounded."""
    kind = register_type(dtype)
    if not isinstance(value, float):
        return f"tl.full([], {value}, {kind})"
    if value == 0 and math.copysign(1.0, value) < 0:  # Triton treats -0.0 as 0
        return f"tl.full([], 0.0, {kind}) * -1.0"
    return (
        f"tl.full([], {value!r}, {kind})"
        if math.isfinite(value)
        else f'tl.full([], float("{value}"), {kind})'
    )


def _rule(op: str, kinds: Iterable[str], text: str) -> None:
    for kind in kinds:
        _RULES[op, kind] = text


def _build() -> None:
    for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
        _rule(op, (*_FLOAT, *_INT), f"{{0}} {sign} {{1}}")
    for op, sign in (
        ("eq", "=="),
        ("ne", "!="),
        ("lt", "<"),
        ("le", "<="),
        ("gt", ">"),
        ("ge", ">="),
    ):
        _rule(op, (*_FLOAT, *_INT), f"{{0}} {sign} {{1}}")
        _rule(op, ["bool"], f"{{0}}.to(tl.int32) {sign} {{1}}.to(tl.int32)")
    _rule("add", ["bool"], "{0} | {1}")
    _rule("mul", ["bool"], "{0} & {1}")
    _rule("square", (*_FLOAT, *_INT), "{0} * {0}")
    _rule("cube", (*_FLOAT, *_INT), "{0} * {0} * {0}")
    _rule("fma", _FLOAT, "tl.fma({0}, {1}, {2})")
    _rule("fma", _INT, "{0} * {1} + {2}")
    _rule("where", _ALL, "tl.where({0}, {1}, {2})")
    _rule("neg", _FLOAT, "{0} * -1.0")  # Triton's minus is 0 - x, which loses the sign of 0
    _rule("neg", _INT, "0 - {0}")
    _rule("abs", (*_FLOAT, "int"), "tl.abs({0})")
    _rule("abs", ["uint"], "{0}")
    for kind in _FLOAT:
        word = "tl.float64" if kind == "f64" else "tl.float32"
        _rule("sign", [kind], f"({{0}} > 0).to({word}) - ({{0}} < 0).to({word})")
    _rule("sign", ["int"], "tl.minimum(tl.maximum({0}, -1), 1)")
    _rule("sign", ["uint"], "tl.minimum({0}, 1)")
    _rule("sign", ["bool"], "{0}")
    for op in ("maximum", "minimum"):
        _rule(op, _FLOAT, f"tl.{op}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)")
        _rule(op, _INT, f"tl.{op}({{0}}, {{1}})")
    _rule("maximum", ["bool"], "{0} | {1}")
    _rule("minimum", ["bool"], "{0} & {1}")
    _rule("isnan", _FLOAT, "{0} != {0}")
    _rule("isinf", _FLOAT, 'tl.abs({0}) == float("inf")')
    _build_logic()
    _build_division()
    _build_elementary()


def _build_logic() -> None:
    numbers = (*_FLOAT, *_INT)
    _rule("logical_not", numbers, "{0} == 0")
    _rule("logical_not", ["bool"], "~{0}")
    _rule("bitwise_not", ["int", "bool"], "~{0}")
    _rule("bitwise_not", ["uint"], "{0} ^ 255")
    for op, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        _rule(f"logical_{op}", numbers, f"({{0}} != 0) {sign} ({{1}} != 0)")
        _rule(f"logical_{op}", ["bool"], f"{{0}} {sign} {{1}}")
        _rule(f"bitwise_{op}", (*_INT, "bool"), f"{{0}} {sign} {{1}}")


def _build_division() -> None:
    _rule("div", ["f32"], "tl.div_rn({0}, {1})")
    _rule("div", ["half", "f64"], "{0} / {1}")
    _rule("reciprocal", ["f32"], "tl.div_rn(1.0, {0})")
    _rule("reciprocal", ["half", "f64"], "1.0 / {0}")
    _rule("div_trunc", _SINGLE, "libdevice.trunc(tl.div_rn({0}, {1}))")
    _rule("div_trunc", ["f64"], "libdevice.trunc({0} / {1})")
    _rule("div_floor", _SINGLE, "div_floor_float({0}, {1})")
    _rule("div_floor", ["f64"], "div_floor_double({0}, {1})")
    _rule("fmod", _FLOAT, "libdevice.fmod({0}, {1})")
    _rule("remainder", _FLOAT, "remainder_float({0}, {1})")
    for op in ("div_trunc", "div_floor", "fmod", "remainder", "lshift", "rshift"):
        _rule(op, ["int"], f"{op}_int({{0}}, {{1}})")
    for op, function in (
        ("div_trunc", "div"),
        ("div_floor", "div"),
        ("fmod", "fmod"),
        ("remainder", "fmod"),
    ):
        _rule(op, ["uint"], f"{function}_uint({{0}}, {{1}})")
    for op in ("lshift", "rshift"):
        _rule(op, ["uint"], f"{op}_uint({{0}}, {{1}})")
    _rule("pow", ["int"], "power_int({0}, {1})")
    _rule("pow", ["uint"], "power_uint({0}, {1})")


def _build_elementary() -> None:
    for op in "expm1 log log2 log1p sin cos tan tanh sinh cosh asin acos atan erf erfc floor ceil trunc".split():
        _rule(op, _FLOAT, f"libdevice.{op}({{0}})")
    for op in ("erf", "erf_absolute", "tanh", "sigmoid"):
        _rule(op, ["half"], f"{op}_half({{0}})")
    for op in ("exp", "exp2"):
        _rule(op, ("f32", "f64"), f"libdevice.{op}({{0}})")
    # Triton's exp costs three times as much, since it is also correct for denormal results
    _rule("exp", ["half"], f"tl.exp2({{0}} * {_LOG2_E!r})")
    _rule("exp2", ["half"], "tl.exp2({0})")
    for op in ("pow", "atan2", "copysign"):
        _rule(op, _FLOAT, f"libdevice.{op}({{0}}, {{1}})")
    _rule("round", _FLOAT, "libdevice.rint({0})")
    for op in ("round", "floor", "ceil", "trunc"):
        _rule(op, _INT, "{0}")
    _rule("sqrt", ["f32"], "tl.sqrt_rn({0})")
    _rule("sqrt", ["half"], "tl.sqrt({0})")
    _rule("sqrt", ["f64"], "libdevice.sqrt({0})")
    _rule("rsqrt", _FLOAT, "libdevice.rsqrt({0})")
    _rule("sigmoid", ["f32"], "tl.div_rn(1.0, 1.0 + libdevice.exp({0} * -1.0))")
    _rule("sigmoid", ["f64"], "1.0 / (1.0 + libdevice.exp({0} * -1.0))")


_build()

# SPDX-License-Identifier: Apache-2.0
"""The table of pointwise ops: (op, kind of operand) -> emitter. ``supports`` reads it too."""

from collections.abc import Callable, Iterable

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import elementary as f32
from blade.backends.disc.cpu.emit import float_division as floats
from blade.backends.disc.cpu.emit import integer_ops as integers
from blade.backends.disc.cpu.emit import trigonometry
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.core.dtypes import HALVES
from blade.core.reason import Code
from blade.errors import Refused

Rule = Callable[..., SsaValue]

KINDS: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "f32",
    torch.float16: "f32",
    torch.float64: "f64",
    torch.int64: "int",
    torch.int32: "int",
    torch.int16: "int",
    torch.int8: "int",
    torch.uint8: "uint",
    torch.bool: "bool",
}
FLOAT, INT = ("f32", "f64"), ("int", "uint")
RULES: dict[tuple[str, str], Rule] = {}


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` on operands of ``dtype`` (``where``: of its branches) can be generated."""
    if dtype not in KINDS:
        return False
    return op == "cast" or (op, KINDS[dtype]) in RULES


def compute(
    code: MlirBuilder, op: str, args: list[SsaValue], source: torch.dtype, dtype: torch.dtype
) -> SsaValue:
    """Emit ``op``; ``source`` is the operands' dtype (of the branches for ``where``), ``dtype`` the result's."""
    if op == "cast":
        return cast(code, args[0], source, dtype)
    if not supports(op, source):
        name = str(source).removeprefix("torch.")
        raise Refused(Code.UNSUPPORTED_DTYPE, f"The CPU emitter has no {op} for {name}.")
    return RULES[op, KINDS[source]](code, *args)


def cast(code: MlirBuilder, x: SsaValue, source: torch.dtype, dtype: torch.dtype) -> SsaValue:
    """Conversion as in C and torch: truncation to ints, nonzero to bool.

    A half value may be more precise in its register than in memory; a cast takes the rounded value.
    """
    if source != dtype and source in HALVES:
        x = memory.round_to(code, x, source)
    element = memory.REGISTER[dtype]
    if dtype == torch.bool:
        if source == torch.bool:
            return x
        return code.compare("une" if x.is_float else "ne", x, code.like(0, x))
    if x.is_float and element in ("f32", "f64"):
        if x.element != element:
            x = code.convert("arith.extf" if element == "f64" else "arith.truncf", x, element)
        return memory.round_to(code, x, dtype) if source != dtype else x
    if x.is_float:
        wide = code.convert("arith.fptosi", x, "i64" if element == "i64" else "i32")
        return wide if wide.element == element else code.convert("arith.trunci", wide, element)
    unsigned = source in (torch.bool, torch.uint8)
    if element in ("f32", "f64"):
        y = code.convert("arith.uitofp" if unsigned else "arith.sitofp", x, element)
        return memory.round_to(code, y, dtype)
    return _resize(code, x, element, unsigned)


def _resize(code: MlirBuilder, x: SsaValue, element: str, unsigned: bool) -> SsaValue:
    have, want = int(x.element[1:]), int(element[1:])
    if have == want:
        return x
    if have > want:
        return code.convert("arith.trunci", x, element)
    return code.convert("arith.extui" if unsigned else "arith.extsi", x, element)


def _rule(op: str, kinds: Iterable[str], rule: Rule) -> None:
    for kind in kinds:
        RULES[op, kind] = rule


def _plain(name: str) -> Rule:
    return lambda code, *args: code.apply(name, *args)


def _compare(floats: str, signed: str, unsigned: str) -> None:
    op = floats[1:]
    _rule(op, FLOAT, lambda code, a, b: code.compare(floats, a, b))
    _rule(op, ["int"], lambda code, a, b: code.compare(signed, a, b))
    _rule(op, ["uint", "bool"], lambda code, a, b: code.compare(unsigned, a, b))


def _maximum(code: MlirBuilder, a: SsaValue, b: SsaValue, predicate: str = "ogt") -> SsaValue:
    """NaN if either is NaN: the select gives b if unordered, which is wrong only if a is the NaN."""
    m = code.select(code.compare(predicate, a, b), a, b)
    return code.select(code.compare("uno", a, a), a, m)


def _minimum(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    return _maximum(code, a, b, "olt")


def _sign(code: MlirBuilder, x: SsaValue) -> SsaValue:
    """-1, 0 or 1; torch gives 0 for NaN too."""
    one, zero = code.like(1, x), code.like(0, x)
    up = code.select(code.compare("ogt" if x.is_float else "sgt", x, zero), one, zero)
    return code.select(code.compare("olt" if x.is_float else "slt", x, zero), code.like(-1, x), up)


def _rsqrt(code: MlirBuilder, x: SsaValue) -> SsaValue:
    return code.div(code.like(1.0, x), code.apply("math.sqrt", x))


def _cube(code: MlirBuilder, x: SsaValue) -> SsaValue:
    return code.mul(code.mul(x, x), x)


def _truth(code: MlirBuilder, x: SsaValue) -> SsaValue:
    if x.element == "i1":
        return x
    return code.compare("une" if x.is_float else "ne", x, code.like(0, x))


def _logical(name: str) -> Rule:
    return lambda code, a, b: code.apply(name, _truth(code, a), _truth(code, b))


def _not(code: MlirBuilder, x: SsaValue) -> SsaValue:
    t = _truth(code, x)
    return code.apply("arith.xori", t, code.like(1, t))


def _libm(function: str) -> Rule:
    return lambda code, *args: code.call(function, *args)


def _build() -> None:
    everything = (*FLOAT, *INT, "bool")
    for op in ("add", "sub", "mul"):
        _rule(op, (*FLOAT, *INT), lambda code, a, b, op=op: getattr(code, op)(a, b))
    _rule("add", ["bool"], _plain("arith.ori"))
    _rule("mul", ["bool"], _plain("arith.andi"))
    _rule("div", FLOAT, lambda code, a, b: code.div(a, b))
    _rule("square", (*FLOAT, *INT), lambda code, x: code.mul(x, x))
    _rule("cube", (*FLOAT, *INT), _cube)
    _rule("neg", (*FLOAT, *INT), lambda code, x: code.neg(x))
    _rule("abs", FLOAT, lambda code, x: code.abs(x))
    _rule("abs", ["int"], lambda code, x: code.apply("arith.maxsi", x, code.neg(x)))
    _rule("abs", ["uint"], lambda code, x: x)
    _rule("sign", (*FLOAT, "int"), _sign)
    _rule("sign", ["uint"], lambda code, x: code.apply("arith.minui", x, code.like(1, x)))
    _rule("sign", ["bool"], lambda code, x: x)
    _rule("sqrt", FLOAT, _plain("math.sqrt"))
    _rule("rsqrt", FLOAT, _rsqrt)
    _rule("reciprocal", FLOAT, lambda code, x: code.div(code.like(1.0, x), x))
    for op, name in (
        ("floor", "floor"),
        ("ceil", "ceil"),
        ("round", "roundeven"),
        ("trunc", "trunc"),
    ):
        _rule(op, FLOAT, _plain(f"math.{name}"))
        _rule(op, INT, lambda code, x: x)
    for names in (
        ("oeq", "eq", "eq"),
        ("une", "ne", "ne"),
        ("olt", "slt", "ult"),
        ("ole", "sle", "ule"),
        ("ogt", "sgt", "ugt"),
        ("oge", "sge", "uge"),
    ):
        _compare(*names)
    _rule("maximum", FLOAT, _maximum)
    _rule("minimum", FLOAT, _minimum)
    _rule("copysign", FLOAT, _plain("math.copysign"))
    _rule("maximum", ["int"], _plain("arith.maxsi"))
    _rule("minimum", ["int"], _plain("arith.minsi"))
    _rule("maximum", ["uint", "bool"], _plain("arith.maxui"))
    _rule("minimum", ["uint", "bool"], _plain("arith.minui"))
    _rule("where", everything, lambda code, c, a, b: code.select(c, a, b))
    _rule("fma", FLOAT, lambda code, a, b, c: code.fma(a, b, c))
    _rule("fma", INT, lambda code, a, b, c: code.add(code.mul(a, b), c))
    _rule("logical_not", everything, _not)
    for op, name in (("and", "andi"), ("or", "ori"), ("xor", "xori")):
        _rule(f"logical_{op}", everything, _logical(f"arith.{name}"))
        _rule(f"bitwise_{op}", (*INT, "bool"), _plain(f"arith.{name}"))
    _rule("bitwise_not", INT, lambda code, x: code.apply("arith.xori", x, code.like(-1, x)))
    _rule("bitwise_not", ["bool"], _not)
    _rule("isnan", FLOAT, lambda code, x: code.compare("uno", x, x))
    _rule(
        "isinf", FLOAT, lambda code, x: code.compare("oeq", code.abs(x), code.like(float("inf"), x))
    )
    _build_elementary()
    _build_division()


def _build_elementary() -> None:
    for op in "exp exp2 expm1 log log2 log1p tanh erf erfc sigmoid".split():
        _rule(op, ["f32"], getattr(f32, op))
    for op in "sin cos tan sinh cosh asin acos atan".split():
        _rule(op, ["f32"], getattr(trigonometry, op))
    libm = "exp exp2 expm1 log log2 log1p tanh erf erfc sin cos tan sinh cosh asin acos atan"
    for op in libm.split():
        _rule(op, ["f64"], _libm(op))
    _rule("sigmoid", ["f64"], floats.sigmoid)
    for op in ("pow", "atan2", "fmod"):
        _rule(op, ["f32"], _libm(op + "f"))
        _rule(op, ["f64"], _libm(op))


def _build_division() -> None:
    for op in ("div_floor", "div_trunc", "remainder"):
        _rule(op, FLOAT, getattr(floats, op))
    for op in ("div_floor", "div_trunc", "remainder", "fmod", "lshift", "rshift"):
        _rule(op, ["int"], getattr(integers, op))
    for op in ("div_floor", "div_trunc"):
        _rule(op, ["uint"], integers.divide_unsigned)
    for op in ("remainder", "fmod"):
        _rule(op, ["uint"], integers.remainder_unsigned)
    _rule("lshift", ["uint"], integers.lshift)
    _rule("rshift", ["uint"], integers.rshift_unsigned)
    _rule("pow", ["int"], integers.power)
    _rule("pow", ["uint"], lambda code, a, b: integers.power(code, a, b, signed=False))


_build()

# SPDX-License-Identifier: Apache-2.0
"""MLIR text, one SSA operation at a time.

    code = MlirBuilder()
    x = code.constant(2.0, "f32", lanes=8)      # at the function's entry, shared
    y = code.fma(x, x, x)                       # %0 = math.fma %c0, %c0, %c0 : vector<8xf32>

A ``SsaValue`` of one lane is a scalar, of more lanes a vector; operations take operands of one shape.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

FLOATS = ("f32", "f64")


@dataclass(frozen=True)
class SsaValue:
    """An SSA name with its element type (``f32``, ``i64``, ``i1``...) and lane count."""

    name: str
    element: str
    lanes: int

    @property
    def type(self) -> str:
        return type_text(self.element, self.lanes)

    @property
    def is_float(self) -> bool:
        return self.element in FLOATS


def type_text(element: str, lanes: int) -> str:
    """``f32`` or ``vector<8xf32>``."""
    return element if lanes == 1 else f"vector<{lanes}x{element}>"


class MlirBuilder:
    """The body of one function under construction: constants, lines, externals."""

    def __init__(self) -> None:
        self.constants: dict[str, str] = {}
        self.externals: dict[str, str] = {}
        self.lines: list[str] = []
        self.indent = 2
        self._names = 0

    # --- text ---

    def fresh(self) -> str:
        self._names += 1
        return f"%{self._names - 1}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def open(self, text: str) -> None:
        """Start a region: ``text {``."""
        self.line(text + " {")
        self.indent += 1

    def close(self, text: str = "}") -> None:
        self.indent -= 1
        self.line(text)

    def op(self, text: str, element: str, lanes: int) -> SsaValue:
        """Append ``%n = text`` and return it as a value of the given type."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return SsaValue(name, element, lanes)

    # --- constants and shape ---

    def constant(self, value: float, element: str, lanes: int = 1) -> SsaValue:
        literal = _literal(value, element)
        kind = type_text(element, lanes)
        text = f"{literal} : {kind}" if lanes == 1 else f"dense<{literal}> : {kind}"
        if lanes == 1 and element == "i1":
            text = literal  # true and false imply their type
        name = self.constants.setdefault(text, f"%c{len(self.constants)}")
        return SsaValue(name, element, lanes)

    def iota(self, element: str, lanes: int) -> SsaValue:
        """0, 1, ... lanes-1."""
        return self.vector(range(lanes), element)

    def vector(self, values: Sequence[float], element: str) -> SsaValue:
        """A constant with a value per lane."""
        if len(values) == 1:
            return self.constant(values[0], element)
        numbers = ", ".join(_literal(value, element) for value in values)
        text = f"dense<[{numbers}]> : {type_text(element, len(values))}"
        name = self.constants.setdefault(text, f"%c{len(self.constants)}")
        return SsaValue(name, element, len(values))

    def like(self, value: float, x: SsaValue) -> SsaValue:
        """A constant of the shape and type of ``x``."""
        return self.constant(value, x.element, x.lanes)

    def broadcast(self, x: SsaValue, lanes: int) -> SsaValue:
        if x.lanes == lanes:
            return x
        assert x.lanes == 1, x
        kind = type_text(x.element, lanes)
        return self.op(f"vector.broadcast {x.name} : {x.element} to {kind}", x.element, lanes)

    def lane(self, x: SsaValue, k: int) -> SsaValue:
        return (
            x
            if x.lanes == 1
            else self.op(f"vector.extract {x.name}[{k}] : {x.element} from {x.type}", x.element, 1)
        )

    def from_lanes(self, parts: Sequence[SsaValue]) -> SsaValue:
        if len(parts) == 1:
            return parts[0]
        kind = type_text(parts[0].element, len(parts))
        names = ", ".join(p.name for p in parts)
        return self.op(f"vector.from_elements {names} : {kind}", parts[0].element, len(parts))

    def half(self, x: SsaValue, high: bool) -> SsaValue:
        """The low or high half of a vector's lanes."""
        n = x.lanes // 2
        picks = ", ".join(str(k + (n if high else 0)) for k in range(n))
        y = self.op(
            f"vector.shuffle {x.name}, {x.name} [{picks}] : {x.type}, {x.type}", x.element, n
        )
        return (
            y
            if n > 1
            else self.op(
                f"vector.extract {y.name}[0] : {x.element} from vector<1x{x.element}>", x.element, 1
            )
        )

    # --- operations ---

    def apply(self, name: str, *args: SsaValue) -> SsaValue:
        """``name`` on operands of one type, with a result of that type."""
        first = args[0]
        assert all(a.type == first.type for a in args), (name, args)
        return self.op(
            f"{name} {', '.join(a.name for a in args)} : {first.type}", first.element, first.lanes
        )

    def convert(self, name: str, x: SsaValue, element: str) -> SsaValue:
        kind = type_text(element, x.lanes)
        return self.op(f"{name} {x.name} : {x.type} to {kind}", element, x.lanes)

    def compare(self, predicate: str, a: SsaValue, b: SsaValue) -> SsaValue:
        """``predicate`` in MLIR's spelling: oeq, une, olt... for floats, eq, slt, ult... for ints."""
        assert a.type == b.type, (predicate, a, b)
        name = "arith.cmpf" if a.is_float else "arith.cmpi"
        return self.op(f"{name} {predicate}, {a.name}, {b.name} : {a.type}", "i1", a.lanes)

    def select(self, condition: SsaValue, a: SsaValue, b: SsaValue) -> SsaValue:
        assert a.type == b.type, (a, b)
        kinds = a.type if a.lanes == 1 else f"{condition.type}, {a.type}"
        return self.op(
            f"arith.select {condition.name}, {a.name}, {b.name} : {kinds}", a.element, a.lanes
        )

    def add(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.addf" if a.is_float else "arith.addi", a, b)

    def sub(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.subf" if a.is_float else "arith.subi", a, b)

    def mul(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.mulf" if a.is_float else "arith.muli", a, b)

    def div(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.divf", a, b)

    def fma(self, a: SsaValue, b: SsaValue, c: SsaValue) -> SsaValue:
        return self.apply("math.fma", a, b, c)

    def neg(self, x: SsaValue) -> SsaValue:
        return self.apply("arith.negf", x) if x.is_float else self.sub(self.like(0, x), x)

    def abs(self, x: SsaValue) -> SsaValue:
        return self.apply("math.absf", x)

    def bits(self, x: SsaValue) -> SsaValue:
        """A float's bit pattern."""
        return self.convert("arith.bitcast", x, "i32" if x.element == "f32" else "i64")

    def from_bits(self, x: SsaValue) -> SsaValue:
        return self.convert("arith.bitcast", x, "f32" if x.element == "i32" else "f64")

    def call(self, function: str, *args: SsaValue) -> SsaValue:
        """Call an external scalar function of libm, once per lane."""
        kind = args[0].element
        self.externals[function] = (
            f"llvm.func @{function}({', '.join([kind] * len(args))}) -> {kind}"
        )
        signature = f"({', '.join([kind] * len(args))}) -> {kind}"
        parts = []
        for k in range(args[0].lanes):
            names = ", ".join(self.lane(a, k).name for a in args)
            parts.append(self.op(f"llvm.call @{function}({names}) : {signature}", kind, 1))
        return self.from_lanes(parts)


def _literal(value: float, element: str) -> str:
    if element == "i1":
        return "true" if value else "false"
    if not element.startswith("f"):
        return str(int(value))
    if math.isfinite(value):
        text = repr(float(value))
        mantissa, _, exponent = text.partition("e")
        mantissa = mantissa if "." in mantissa else mantissa + ".0"
        return f"{mantissa}e{exponent}" if exponent else mantissa
    if element == "f64":
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"

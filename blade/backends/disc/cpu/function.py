# SPDX-License-Identifier: Apache-2.0
"""An LLVM function over raw pointers, written operation by operation: ``Code`` with memory and loops.

f = Function("double_all", "p:ptr n:i64", target.lanes)
with f.loop(f.number(0), f["n"], 1) as i:
    at = f.at(f["p"], i)
    f.store(f.add(f.load(at), f.load(at)), at)
text = f.text()
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blade.backends.disc.cpu.code import Code, Value, type_text

ENTRY = "ptrs:ptr ints:ptr begin:i64 end:i64"  # what the executor calls (FORMAT.md)


class Carry:
    """A loop's index and carried values; ``next`` says what the following round gets."""

    def __init__(self, index: Value, values: list[Value]) -> None:
        self.index, self.values = index, values
        self.following: list[Value] | None = None
        self.results: list[Value] = []

    def next(self, values: Sequence[Value]) -> None:
        self.following = list(values)


class Function(Code):
    """``arguments``: ``name:type`` words, read back by ``f["name"]``. Nothing is returned but through memory."""

    def __init__(self, name: str, arguments: str, lanes: int) -> None:
        super().__init__()
        self.name, self.lanes = name, lanes
        pairs = [word.split(":") for word in arguments.split()]
        self.arguments = {n: Value(f"%{n}", kind, 1) for n, kind in pairs}

    def __getitem__(self, name: str) -> Value:
        return self.arguments[name]

    def text(self, internal: bool = True) -> str:
        """The function as MLIR."""
        pairs = ", ".join(f"{v.name}: {_type(v.element)}" for v in self.arguments.values())
        # One copy of each: what is inlined into several callers is compiled several times.
        apart = ' attributes {passthrough = ["noinline"]}' if internal else ""
        head = f"llvm.func {'internal ' if internal else ''}@{self.name}({pairs}){apart} {{"
        constants = [f"    {c} = arith.constant {text}" for text, c in self.constants.items()]
        return "\n".join([head, *constants, *self.lines, "    llvm.return", "}"])

    def number(self, value: int) -> Value:
        return self.constant(value, "i64")

    def least(self, a: Value, b: Value) -> Value:
        return self.apply("arith.minsi", a, b)

    def most(self, a: Value, b: Value) -> Value:
        return self.apply("arith.maxsi", a, b)

    def above(self, a: Value, b: Value | int) -> Value:
        """Ceiling of a / b, for a >= 0 and b > 0."""
        by = self.number(b) if isinstance(b, int) else b
        more = self.number(b - 1) if isinstance(b, int) else self.sub(b, self.number(1))
        return self.apply("arith.divui", self.add(a, more), by)

    def floor_to(self, a: Value, step: int) -> Value:
        """The largest multiple of ``step`` up to ``a``, which is not negative."""
        return self.sub(a, self.apply("arith.remui", a, self.number(step)))

    # --- memory ---

    def at(self, pointer: Value, offset: Value | int, element: str = "f32") -> Value:
        """The address ``offset`` elements on."""
        kind = _type(element)
        if isinstance(offset, int):
            text = f"llvm.getelementptr {pointer.name}[{offset}] : (!llvm.ptr) -> !llvm.ptr, {kind}"
        else:
            text = f"llvm.getelementptr {pointer.name}[{offset.name}] : (!llvm.ptr, i64) -> !llvm.ptr, {kind}"
        return self.op(text, "ptr", 1)

    def either(self, condition: Value, a: Value, b: Value) -> Value:
        """One of two pointers."""
        return self.op(f"arith.select {condition.name}, {a.name}, {b.name} : !llvm.ptr", "ptr", 1)

    def load(self, address: Value, lanes: int = 1, element: str = "f32") -> Value:
        if element == "ptr":
            return self.op(f"llvm.load {address.name} : !llvm.ptr -> !llvm.ptr", "ptr", 1)
        kind = type_text(element, lanes)
        align = f" {{alignment = {_align(element)} : i64}}" if lanes > 1 else ""
        return self.op(f"llvm.load {address.name}{align} : !llvm.ptr -> {kind}", element, lanes)

    def store(self, x: Value, address: Value) -> None:
        align = f" {{alignment = {_align(x.element)} : i64}}" if x.lanes > 1 else ""
        self.line(f"llvm.store {x.name}, {address.name}{align} : {x.type}, !llvm.ptr")

    def first_lanes(self, count: Value) -> Value:
        """A mask of the first ``count`` lanes."""
        small = self.op(f"arith.trunci {count.name} : i64 to i32", "i32", 1)
        return self.compare("slt", self.iota("i32", self.lanes), self.broadcast(small, self.lanes))

    def load_masked(self, address: Value, mask: Value, element: str = "f32") -> Value:
        """Zeros where the mask says no; nothing is touched there."""
        zeros = self.constant(0, element, mask.lanes)
        types = f"(!llvm.ptr, {mask.type}, {zeros.type}) -> {zeros.type}"
        words = f"llvm.intr.masked.load {address.name}, {mask.name}, {zeros.name}"
        align = f"{{alignment = {_align(element)} : i32}}"
        return self.op(f"{words} {align} : {types}", element, mask.lanes)

    def store_masked(self, x: Value, address: Value, mask: Value) -> None:
        types = f"{x.type}, {mask.type} into !llvm.ptr"
        words = f"llvm.intr.masked.store {x.name}, {address.name}, {mask.name}"
        self.line(f"{words} {{alignment = {_align(x.element)} : i32}} : {types}")

    def stack(self, count: int, element: str = "f32") -> Value:
        """Room for ``count`` elements while the function runs; not inside of a loop."""
        text = f"llvm.alloca {self.number(count).name} x {_type(element)} {{alignment = 64 : i64}}"
        return self.op(f"{text} : (i64) -> !llvm.ptr", "ptr", 1)

    # --- control ---

    @contextmanager
    def loop(self, low: Value, high: Value, step: Value | int) -> Iterator[Value]:
        """``for index in range(low, high, step)``."""
        index = self.fresh()
        by = self.number(step) if isinstance(step, int) else step
        self.open(f"scf.for {index} = {low.name} to {high.name} step {by.name} : i64")
        yield Value(index, "i64", 1)
        self.close()

    @contextmanager
    def carrying(
        self, low: Value, high: Value, step: int, values: Sequence[Value]
    ) -> Iterator[Carry]:
        """A loop that hands values from one round to the next; ``results`` is what the last one left."""
        index, name, count = self.fresh(), self.fresh(), len(values)
        names = [self.fresh() for _ in values]
        pairs = ", ".join(f"{n} = {v.name}" for n, v in zip(names, values, strict=True))
        types = ", ".join(v.type for v in values)
        carry = Carry(
            Value(index, "i64", 1),
            [Value(n, v.element, v.lanes) for n, v in zip(names, values, strict=True)],
        )
        self.open(
            f"{name}:{count} = scf.for {index} = {low.name} to {high.name} step {self.number(step).name} "
            f"iter_args({pairs}) -> ({types}) : i64"
        )
        yield carry
        assert carry.following is not None, self.name
        self.line(f"scf.yield {', '.join(v.name for v in carry.following)} : {types}")
        self.close()
        carry.results = [
            Value(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(carry.values)
        ]

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        self.open(f"scf.if {condition.name}")
        yield
        self.close()

    def branch(self) -> None:
        """Between the two halves of a ``when``: what follows runs where the condition is false."""
        self.close("} else {")
        self.indent += 1

    def run(self, function: "Function", **arguments: Value) -> None:
        """Call another function of this text with these arguments."""
        assert arguments.keys() == function.arguments.keys(), (function.name, arguments.keys())
        ordered = [arguments[n] for n in function.arguments]
        for given, wanted in zip(ordered, function.arguments.values(), strict=True):
            assert given.element == wanted.element, (function.name, given, wanted)
        names = ", ".join(v.name for v in ordered)
        types = ", ".join(_type(v.element) for v in ordered)
        self.line(f"llvm.call @{function.name}({names}) : ({types}) -> ()")


def _align(element: str) -> int:
    return min(4, int(element[1:]) // 8)


def _type(element: str) -> str:
    return "!llvm.ptr" if element == "ptr" else element

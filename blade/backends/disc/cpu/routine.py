# SPDX-License-Identifier: Apache-2.0
"""One native function under construction: arguments, loops and addresses on top of ``Code``.

    f = Routine("copy", [("from", POINTER), ("to", POINTER), ("n", "i64")])
    with f.loop(0, f["n"]) as i:
        f.store(f.load(f["from"], i), f["to"], i)
    f.text()

Pointers point to f32 unless said otherwise. An ``int`` where a ``Value`` is due is a constant i64.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blade.backends.disc.cpu.code import Code, Value, type_text

POINTER = "!llvm.ptr"
KERNEL = (("ptrs", POINTER), ("ints", POINTER), ("begin", "i64"), ("end", "i64"))
"""The arguments of what the executor calls (FORMAT.md)."""

Int = Value | int


class Routine(Code):
    """The body of a function without a result. ``internal``: called from this module only."""

    def __init__(
        self, name: str, arguments: Sequence[tuple[str, str]] = KERNEL, internal: bool = False
    ) -> None:
        super().__init__()
        self.name, self.internal = name, internal
        self._results: list[str] = []  # of the open loops that carry values
        self.arguments = {n: Value(f"%{n}", kind, 1) for n, kind in arguments}

    def __getitem__(self, argument: str) -> Value:
        return self.arguments[argument]

    def text(self) -> str:
        constants = [f"    {name} = arith.constant {text}" for text, name in self.constants.items()]
        arguments = ", ".join(f"{a.name}: {a.type}" for a in self.arguments.values())
        head = f"llvm.func {'internal ' * self.internal}@{self.name}({arguments}) {{"
        return "\n".join([head, *constants, *self.lines, "    llvm.return", "}"]) + "\n"

    # --- control ---

    @contextmanager
    def loop(self, low: Int, high: Int, step: Int = 1) -> Iterator[Value]:
        """``for index in range(low, high, step)``."""
        index = self.fresh()
        bounds = (
            f"{self.number(low).name} to {self.number(high).name} step {self.number(step).name}"
        )
        self.open(f"scf.for {index} = {bounds} : i64")
        yield Value(index, "i64", 1)
        self.close()

    def carry(
        self, low: Int, high: Int, step: Int, start: Sequence[Value]
    ) -> tuple[Value, list[Value]]:
        """Open a loop that carries values: its index and them. ``carried`` closes it."""
        index, names = self.fresh(), [self.fresh() for _ in start]
        result, types = self.fresh(), ", ".join(v.type for v in start)
        pairs = ", ".join(f"{n} = {v.name}" for n, v in zip(names, start, strict=True))
        bounds = (
            f"{self.number(low).name} to {self.number(high).name} step {self.number(step).name}"
        )
        self.open(
            f"{result}:{len(start)} = scf.for {index} = {bounds} iter_args({pairs}) -> ({types}) : i64"
        )
        self._results.append(result)
        values = [Value(n, v.element, v.lanes) for n, v in zip(names, start, strict=True)]
        return Value(index, "i64", 1), values

    def carried(self, following: Sequence[Value]) -> list[Value]:
        """Close the loop that ``carry`` opened with what it carries on; what it ends with."""
        types = ", ".join(v.type for v in following)
        self.line(f"scf.yield {', '.join(v.name for v in following)} : {types}")
        self.close()
        result = self._results.pop()
        return [Value(f"{result}#{k}", v.element, v.lanes) for k, v in enumerate(following)]

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        self.open(f"scf.if {condition.name}")
        yield
        self.close()

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """Right after ``when``: the other case."""
        assert self.lines[-1].strip() == "}", self.lines[-1]
        self.lines.pop()
        self.open("} else")
        yield
        self.close()

    def switch(self, which: Value, cases: dict[int, "Call"]) -> None:
        """Call the function that belongs to ``which``; no other value may occur."""
        at = self.op(f"arith.index_cast {which.name} : i64 to index", "index", 1)
        self.line(f"scf.index_switch {at.name}")
        for number, (name, arguments) in cases.items():
            self.open(f"case {number}")
            self.invoke(name, arguments)
            self.line("scf.yield")
            self.close()
        self.line("default {")
        self.line("}")

    def invoke(self, name: str, arguments: Sequence[Value]) -> None:
        types = ", ".join(a.type for a in arguments)
        names = ", ".join(a.name for a in arguments)
        self.line(f"llvm.call @{name}({names}) : ({types}) -> ()")

    # --- numbers ---

    def number(self, value: Int) -> Value:
        return self.constant(value, "i64") if isinstance(value, int) else value

    def sum(self, *terms: Int) -> Value:
        total = self.number(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.number(term))
        return total

    def product(self, *factors: Int) -> Value:
        total = self.number(factors[0])
        for factor in factors[1:]:
            total = self.mul(total, self.number(factor))
        return total

    def minus(self, a: Int, b: Int) -> Value:
        return self.sub(self.number(a), self.number(b))

    def least(self, a: Int, b: Int) -> Value:
        return self.apply("arith.minsi", self.number(a), self.number(b))

    def most(self, a: Int, b: Int) -> Value:
        return self.apply("arith.maxsi", self.number(a), self.number(b))

    def over(self, a: Int, b: Int) -> Value:
        """Floor of a / b, for a >= 0 and b > 0."""
        return self.apply("arith.divui", self.number(a), self.number(b))

    def above(self, a: Int, b: Int) -> Value:
        """Ceiling of a / b, for a >= 0 and b > 0."""
        return self.over(self.minus(self.sum(a, b), 1), b)

    def rest(self, a: Int, b: Int) -> Value:
        return self.apply("arith.remui", self.number(a), self.number(b))

    def test(self, predicate: str, a: Int, b: Int) -> Value:
        return self.compare(predicate, self.number(a), self.number(b))

    def pick(self, condition: Value, a: Int, b: Int) -> Value:
        return self.select(condition, self.number(a), self.number(b))

    # --- memory ---

    def at(self, pointer: Value, index: Int, element: str = "f32") -> Value:
        """The address ``index`` elements on."""
        if isinstance(index, int):
            text = (
                f"llvm.getelementptr {pointer.name}[{index}] : (!llvm.ptr) -> !llvm.ptr, {element}"
            )
        else:
            text = f"llvm.getelementptr {pointer.name}[{index.name}] : (!llvm.ptr, i64) -> !llvm.ptr, {element}"
        return self.op(text, POINTER, 1)

    def load(self, pointer: Value, index: Int = 0, element: str = "f32", lanes: int = 1) -> Value:
        at, kind = self.at(pointer, index, element), type_text(element, lanes)
        return self.op(
            f"llvm.load {at.name} {_align(element)} : !llvm.ptr -> {kind}", element, lanes
        )

    def store(self, value: Value, pointer: Value, index: Int = 0) -> None:
        at = self.at(pointer, index, value.element)
        self.line(
            f"llvm.store {value.name}, {at.name} {_align(value.element)} : {value.type}, !llvm.ptr"
        )

    def prefetch(self, pointer: Value, index: Int, write: bool = False) -> None:
        """Ask for the cache line of an f32, into L1."""
        at = self.at(pointer, index)
        self.line(
            f'"llvm.intr.prefetch"({at.name}) <{{cache = 1 : i32, hint = 3 : i32, rw = {int(write)} : i32}}> '
            ": (!llvm.ptr) -> ()"
        )

    def masked_load(self, pointer: Value, index: Int, mask: Value) -> Value:
        """f32 lanes of ``mask``; the others are zero and not touched."""
        at, kind = self.at(pointer, index), type_text("f32", mask.lanes)
        zero = self.constant(0.0, "f32", mask.lanes)
        return self.op(
            f"llvm.intr.masked.load {at.name}, {mask.name}, {zero.name} {{alignment = 4 : i32}} "
            f": (!llvm.ptr, {mask.type}, {kind}) -> {kind}",
            "f32",
            mask.lanes,
        )

    def masked_store(self, value: Value, pointer: Value, index: Int, mask: Value) -> None:
        at = self.at(pointer, index)
        self.line(
            f"llvm.intr.masked.store {value.name}, {at.name}, {mask.name} {{alignment = 4 : i32}} "
            f": {value.type}, {mask.type} into !llvm.ptr"
        )

    def lanes_below(self, count: Value, lanes: int) -> Value:
        """A mask of the first ``count`` lanes (all, none: any ``count``)."""
        wide = self.broadcast(count, lanes)
        return self.compare("slt", self.iota("i64", lanes), wide)

    def local(self, count: int, element: str) -> Value:
        """Memory on the stack."""
        size = self.constant(count, "i64")
        return self.op(
            f"llvm.alloca {size.name} x {element} {{alignment = 64 : i64}} : (i64) -> !llvm.ptr",
            POINTER,
            1,
        )

    def address(self, pointer: Value) -> Value:
        """The pointer as a number."""
        return self.op(f"llvm.ptrtoint {pointer.name} : {POINTER} to i64", "i64", 1)

    def unpack(self, base: Value, names: Sequence[str], element: str) -> dict[str, Value]:
        """Load the first elements of an array, by name."""
        return {name: self.load(base, k, element) for k, name in enumerate(names)}


Call = tuple[str, Sequence[Value]]


def _align(element: str) -> str:
    size = 8 if element in (POINTER, "i64", "f64") else 4
    return f"{{alignment = {size} : i64}}"

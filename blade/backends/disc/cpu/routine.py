# SPDX-License-Identifier: Apache-2.0
"""A ``Function`` for drivers, which are mostly arithmetic on sizes: plain ints stand for constants.

    f = Routine("copy", (("from", POINTER), ("to", POINTER), ("n", "i64")))
    with f.range(0, f["n"]) as i:
        f.put(f.get(f["from"], i), f["to"], f.sum(i, 1))
    f.text()

Pointers point to f32 unless said otherwise.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from blade.backends.disc.cpu.code import Value
from blade.backends.disc.cpu.function import ENTRY, Function

POINTER = "ptr"
KERNEL = tuple((name, kind) for name, kind in (word.split(":") for word in ENTRY.split()))

Int = Value | int


class Routine(Function):
    """``arguments``: names and types; ``lanes`` only matters to masks."""

    def __init__(
        self, name: str, arguments: Sequence[tuple[str, str]] = KERNEL, lanes: int = 1
    ) -> None:
        super().__init__(name, " ".join(f"{n}:{kind}" for n, kind in arguments), lanes)

    # --- whole numbers ---

    def whole(self, value: Int) -> Value:
        return self.number(value) if isinstance(value, int) else value

    def sum(self, *terms: Int) -> Value:
        total = self.whole(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.whole(term))
        return total

    def product(self, *factors: Int) -> Value:
        total = self.whole(factors[0])
        for factor in factors[1:]:
            total = self.mul(total, self.whole(factor))
        return total

    def minus(self, a: Int, b: Int) -> Value:
        return self.sub(self.whole(a), self.whole(b))

    def least(self, a: Int, b: Int) -> Value:
        return super().least(self.whole(a), self.whole(b))

    def most(self, a: Int, b: Int) -> Value:
        return super().most(self.whole(a), self.whole(b))

    def over(self, a: Int, b: Int) -> Value:
        """Floor of a / b, for a >= 0 and b > 0."""
        return self.apply("arith.divui", self.whole(a), self.whole(b))

    def rest(self, a: Int, b: Int) -> Value:
        return self.apply("arith.remui", self.whole(a), self.whole(b))

    def test(self, predicate: str, a: Int, b: Int) -> Value:
        return self.compare(predicate, self.whole(a), self.whole(b))

    def both(self, a: Value, b: Value) -> Value:
        return self.apply("arith.andi", a, b)

    def pick(self, condition: Value, a: Int, b: Int) -> Value:
        return self.select(condition, self.whole(a), self.whole(b))

    # --- control ---

    def range(self, low: Int, high: Int, step: Int = 1) -> AbstractContextManager[Value]:
        """``for index in range(low, high, step)``."""
        return self.loop(self.whole(low), self.whole(high), step)

    def switch(self, which: Value, cases: Mapping[int, Function], given: dict[str, Value]) -> None:
        """Run the function that belongs to ``which`` with ``given``; no other number may occur."""
        at = self.op(f"arith.index_cast {which.name} : i64 to index", "index", 1)
        self.line(f"scf.index_switch {at.name}")
        for number, function in cases.items():
            self.open(f"case {number}")
            self.run(function, **given)
            self.line("scf.yield")
            self.close()
        self.line("default {")
        self.line("}")

    # --- memory ---

    def get(self, pointer: Value, index: Int = 0, element: str = "f32", lanes: int = 1) -> Value:
        """What lies ``index`` elements on."""
        return self.load(self.at(pointer, index, element), lanes, element)

    def put(self, value: Value, pointer: Value, index: Int = 0) -> None:
        at = self.at(pointer, index, value.element)
        if value.element != POINTER:
            self.store(value, at)
        else:
            self.line(f"llvm.store {value.name}, {at.name} : !llvm.ptr, !llvm.ptr")

    def address(self, pointer: Value) -> Value:
        """The pointer as a number."""
        return self.op(f"llvm.ptrtoint {pointer.name} : !llvm.ptr to i64", "i64", 1)

    def prefetch(self, pointer: Value, write: bool = False, level: int = 1) -> None:
        """Ask for a cache line, into L1 or L2."""
        how = f"<{{cache = 1 : i32, hint = {4 - level} : i32, rw = {int(write)} : i32}}>"
        self.line(f'"llvm.intr.prefetch"({pointer.name}) {how} : (!llvm.ptr) -> ()')

    def unpack(self, base: Value, names: Sequence[str], element: str) -> dict[str, Value]:
        """Load the first elements of an array, by name."""
        return {name: self.get(base, k, element) for k, name in enumerate(names)}

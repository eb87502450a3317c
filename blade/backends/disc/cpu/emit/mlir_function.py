# SPDX-License-Identifier: Apache-2.0
"""An LLVM function over raw pointers, built operation by operation: ``MlirBuilder`` with memory and loops.

f = MlirFunction("double_all", "p:ptr n:i64", target.lanes)
with f.loop(f.number(0), f["n"], 1) as i:
    at = f.at(f["p"], i)
    f.store(f.add(f.load(at), f.load(at)), at)
text = f.text()

``MlirRoutine`` is a ``MlirFunction`` for drivers, which are mostly arithmetic on sizes: plain ints become
constants.

    f = MlirRoutine("copy", (("from", POINTER), ("to", POINTER), ("n", "i64")))
    with f.range(0, f["n"]) as i:
        f.put(f.get(f["from"], i), f["to"], f.sum(i, 1))
    f.text()

Pointers point to f32 unless stated otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue, type_text

ENTRY = "ptrs:ptr ints:ptr begin:i64 end:i64"  # the executor's calling convention (FORMAT.md)
POINTER = "ptr"
KERNEL = tuple((name, kind) for name, kind in (word.split(":") for word in ENTRY.split()))

Int = SsaValue | int


class Carry:
    """A loop's index and carried values; ``next`` sets the values of the following round."""

    def __init__(self, index: SsaValue, values: list[SsaValue]) -> None:
        self.index, self.values = index, values
        self.following: list[SsaValue] | None = None
        self.results: list[SsaValue] = []

    def next(self, values: Sequence[SsaValue]) -> None:
        self.following = list(values)


class MlirFunction(MlirBuilder):
    """``arguments``: ``name:type`` items, read as ``f["name"]``. Results are returned only through memory."""

    def __init__(self, name: str, arguments: str, lanes: int) -> None:
        super().__init__()
        self.name, self.lanes = name, lanes
        self.features = ""
        """Features that this function may use besides the host's, in LLVM's notation."""
        self.flags: tuple[str, ...] = ()
        """LLVM's attributes of this function."""
        self._stacks: list[str] = []
        pairs = [word.split(":") for word in arguments.split()]
        self.arguments = {n: SsaValue(f"%{n}", kind, 1) for n, kind in pairs}

    def __getitem__(self, name: str) -> SsaValue:
        return self.arguments[name]

    def text(self, internal: bool = True) -> str:
        """The function as MLIR."""
        pairs = ", ".join(f"{v.name}: {_type(v.element)}" for v in self.arguments.values())
        # noinline: a function that is inlined into several callers is compiled several times.
        settings = [f'"{word}"' for word in (*(("noinline",) if internal else ()), *self.flags)]
        if self.features:
            settings.append(f'["target-features", "{self.features}"]')
        apart = f" attributes {{passthrough = [{', '.join(settings)}]}}" if settings else ""
        head = f"llvm.func {'internal ' if internal else ''}@{self.name}({pairs}){apart} {{"
        constants = [f"    {c} = arith.constant {text}" for text, c in self.constants.items()]
        lines = [*constants, *self._stacks, *self.lines]
        return "\n".join([head, *lines, "    llvm.return", "}"])

    def number(self, value: int) -> SsaValue:
        return self.constant(value, "i64")

    def least(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.minsi", a, b)

    def most(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.maxsi", a, b)

    def above(self, a: SsaValue, b: SsaValue | int) -> SsaValue:
        """Ceiling of a / b, for a >= 0 and b > 0."""
        by = self.number(b) if isinstance(b, int) else b
        more = self.number(b - 1) if isinstance(b, int) else self.sub(b, self.number(1))
        return self.apply("arith.divui", self.add(a, more), by)

    def floor_to(self, a: SsaValue, step: int) -> SsaValue:
        """The largest multiple of ``step`` up to ``a``, for a >= 0."""
        return self.sub(a, self.apply("arith.remui", a, self.number(step)))

    # --- memory ---

    def at(self, pointer: SsaValue, offset: SsaValue | int, element: str = "f32") -> SsaValue:
        """The address ``offset`` elements after ``pointer``; outside of memory, too, as long as nothing reads there.

        ``nusw``: it does not wrap. Without this, LLVM's passes over loops compare all pairs of addresses of a loop.
        """
        kind = _type(element)
        if isinstance(offset, int):
            text = f"llvm.getelementptr nusw {pointer.name}[{offset}] : (!llvm.ptr) -> !llvm.ptr, {kind}"
        else:
            text = f"llvm.getelementptr nusw {pointer.name}[{offset.name}] : (!llvm.ptr, i64) -> !llvm.ptr, {kind}"
        return self.op(text, "ptr", 1)

    def either(self, condition: SsaValue, a: SsaValue, b: SsaValue) -> SsaValue:
        """One of two pointers."""
        return self.op(f"arith.select {condition.name}, {a.name}, {b.name} : !llvm.ptr", "ptr", 1)

    def load(self, address: SsaValue, lanes: int = 1, element: str = "f32") -> SsaValue:
        if element == "ptr":
            return self.op(f"llvm.load {address.name} : !llvm.ptr -> !llvm.ptr", "ptr", 1)
        kind = type_text(element, lanes)
        align = f" {{alignment = {_align(element)} : i64}}" if lanes > 1 else ""
        return self.op(f"llvm.load {address.name}{align} : !llvm.ptr -> {kind}", element, lanes)

    def store(self, x: SsaValue, address: SsaValue) -> None:
        align = f" {{alignment = {_align(x.element)} : i64}}" if x.lanes > 1 else ""
        self.line(f"llvm.store {x.name}, {address.name}{align} : {x.type}, !llvm.ptr")

    def first_lanes(self, count: SsaValue) -> SsaValue:
        """A mask of the first ``count`` lanes."""
        small = self.op(f"arith.trunci {count.name} : i64 to i32", "i32", 1)
        return self.compare("slt", self.iota("i32", self.lanes), self.broadcast(small, self.lanes))

    def load_masked(self, address: SsaValue, mask: SsaValue, element: str = "f32") -> SsaValue:
        """Load the lanes of the mask; the others are zero, and their memory is not touched."""
        zeros = self.constant(0, element, mask.lanes)
        types = f"(!llvm.ptr, {mask.type}, {zeros.type}) -> {zeros.type}"
        words = f"llvm.intr.masked.load {address.name}, {mask.name}, {zeros.name}"
        align = f"{{alignment = {_align(element)} : i32}}"
        return self.op(f"{words} {align} : {types}", element, mask.lanes)

    def store_masked(self, x: SsaValue, address: SsaValue, mask: SsaValue) -> None:
        types = f"{x.type}, {mask.type} into !llvm.ptr"
        words = f"llvm.intr.masked.store {x.name}, {address.name}, {mask.name}"
        self.line(f"{words} {{alignment = {_align(x.element)} : i32}} : {types}")

    def stack(self, count: int, element: str = "f32") -> SsaValue:
        """Stack memory for ``count`` elements, taken once per call of the function."""
        name = self.fresh()
        text = f"llvm.alloca {self.number(count).name} x {_type(element)} {{alignment = 64 : i64}}"
        self._stacks.append(f"    {name} = {text} : (i64) -> !llvm.ptr")
        return SsaValue(name, "ptr", 1)

    # --- control ---

    @contextmanager
    def loop(self, low: SsaValue, high: SsaValue, step: SsaValue | int) -> Iterator[SsaValue]:
        """``for index in range(low, high, step)``."""
        index = self.fresh()
        by = self.number(step) if isinstance(step, int) else step
        self.open(f"scf.for {index} = {low.name} to {high.name} step {by.name} : i64")
        yield SsaValue(index, "i64", 1)
        self.close()

    @contextmanager
    def carrying(
        self, low: SsaValue, high: SsaValue, step: int, values: Sequence[SsaValue]
    ) -> Iterator[Carry]:
        """A loop that carries values from round to round; ``results`` holds those of the last round."""
        index, name, count = self.fresh(), self.fresh(), len(values)
        names = [self.fresh() for _ in values]
        pairs = ", ".join(f"{n} = {v.name}" for n, v in zip(names, values, strict=True))
        types = ", ".join(v.type for v in values)
        carry = Carry(
            SsaValue(index, "i64", 1),
            [SsaValue(n, v.element, v.lanes) for n, v in zip(names, values, strict=True)],
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
            SsaValue(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(carry.values)
        ]

    @contextmanager
    def when(self, condition: SsaValue) -> Iterator[None]:
        self.open(f"scf.if {condition.name}")
        yield
        self.close()

    def branch(self) -> None:
        """Start the else branch of a ``when``."""
        self.close("} else {")
        self.indent += 1

    def run(self, function: "MlirFunction", **arguments: SsaValue) -> None:
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


class MlirRoutine(MlirFunction):
    """``arguments``: names and types; only masks use ``lanes``."""

    def __init__(
        self, name: str, arguments: Sequence[tuple[str, str]] = KERNEL, lanes: int = 1
    ) -> None:
        super().__init__(name, " ".join(f"{n}:{kind}" for n, kind in arguments), lanes)

    # --- whole numbers ---

    def whole(self, value: Int) -> SsaValue:
        return self.number(value) if isinstance(value, int) else value

    def sum(self, *terms: Int) -> SsaValue:
        total = self.whole(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.whole(term))
        return total

    def product(self, *factors: Int) -> SsaValue:
        total = self.whole(factors[0])
        for factor in factors[1:]:
            total = self.mul(total, self.whole(factor))
        return total

    def minus(self, a: Int, b: Int) -> SsaValue:
        return self.sub(self.whole(a), self.whole(b))

    def least(self, a: Int, b: Int) -> SsaValue:
        return super().least(self.whole(a), self.whole(b))

    def most(self, a: Int, b: Int) -> SsaValue:
        return super().most(self.whole(a), self.whole(b))

    def over(self, a: Int, b: Int) -> SsaValue:
        """Floor of a / b, for a >= 0 and b > 0."""
        return self.apply("arith.divui", self.whole(a), self.whole(b))

    def rest(self, a: Int, b: Int) -> SsaValue:
        return self.apply("arith.remui", self.whole(a), self.whole(b))

    def test(self, predicate: str, a: Int, b: Int) -> SsaValue:
        return self.compare(predicate, self.whole(a), self.whole(b))

    def both(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.apply("arith.andi", a, b)

    def pick(self, condition: SsaValue, a: Int, b: Int) -> SsaValue:
        return self.select(condition, self.whole(a), self.whole(b))

    # --- control ---

    def range(self, low: Int, high: Int, step: Int = 1) -> AbstractContextManager[SsaValue]:
        """``for index in range(low, high, step)``."""
        return self.loop(self.whole(low), self.whole(high), step)

    def switch(
        self, which: SsaValue, cases: Mapping[int, MlirFunction], given: dict[str, SsaValue]
    ) -> None:
        """Run the function of case ``which`` with ``given``; ``which`` must be one of ``cases``."""
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

    def get(
        self, pointer: SsaValue, index: Int = 0, element: str = "f32", lanes: int = 1
    ) -> SsaValue:
        """Load the element ``index`` elements after ``pointer``."""
        return self.load(self.at(pointer, index, element), lanes, element)

    def put(self, value: SsaValue, pointer: SsaValue, index: Int = 0) -> None:
        at = self.at(pointer, index, value.element)
        if value.element != POINTER:
            self.store(value, at)
        else:
            self.line(f"llvm.store {value.name}, {at.name} : !llvm.ptr, !llvm.ptr")

    def address(self, pointer: SsaValue) -> SsaValue:
        """The pointer as a number."""
        return self.op(f"llvm.ptrtoint {pointer.name} : !llvm.ptr to i64", "i64", 1)

    def prefetch(self, pointer: SsaValue, write: bool = False, level: int = 1) -> None:
        """Prefetch a cache line into L1 or L2."""
        how = f"<{{cache = 1 : i32, hint = {4 - level} : i32, rw = {int(write)} : i32}}>"
        self.line(f'"llvm.intr.prefetch"({pointer.name}) {how} : (!llvm.ptr) -> ()')

    def unpack(self, base: SsaValue, names: Sequence[str], element: str) -> dict[str, SsaValue]:
        """Load the first elements of an array, by name."""
        return {name: self.get(base, k, element) for k, name in enumerate(names)}

# SPDX-License-Identifier: Apache-2.0
"""Programs written by hand: ``Writer`` puts the sections in order and counts the ids."""

from dataclasses import dataclass, field

import torch

from blade.runtime.engine import make_engine

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.bfloat16: "bf16",
}


@dataclass
class Writer:
    """Each method adds one line and returns the id of what it defines."""

    isa: str = ""
    inputs: list[str] = field(default_factory=list)
    registers: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    packs: list[str] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    instructions: list[str] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def input(self, dtype: str, rank: int, device: str = "cpu") -> int:
        self.inputs.append(f"{dtype} {device} {rank}")
        return len(self.inputs) - 1

    def reg(self, text: str) -> int:
        self.registers.append(text)
        return len(self.registers) - 1

    def const(self, value: int) -> int:
        return self.reg(f"const {value}")

    def dims(self, index: int, rank: int) -> list[int]:
        return [self.reg(f"dim {index} {axis}") for axis in range(rank)]

    def slot(self, text: str) -> int:
        self.slots.append(text)
        return len(self.slots) - 1

    def tensor(self, kind: str, sizes: list[int], dtype: str = "f32") -> int:
        return self.slot(f"{kind} {dtype} {join(len(sizes), *sizes)}")

    def view(self, base: int, sizes: list[int], strides: list[int], offset: int) -> int:
        return self.slot(f"view {join(base, len(sizes), *sizes, *strides, offset)}")

    def guard(self, reg: int, text: str) -> None:
        self.guards.append(f"{reg} {text}")

    def call(self, op: str, *args: str, results: tuple[int, ...] = ()) -> None:
        self.instructions.append(
            f"call {op} {join(len(args), *args)} {join(len(results), *results)}"
        )

    def kernel(
        self, name: str, extent: int, cost: int, scratch: int, slots: list[int], ints: list[int]
    ) -> None:
        head = join(name, extent, cost, scratch)
        tail = join(len(slots), *slots, len(ints), *ints)
        self.instructions.append(f"kernel {head} {tail}")

    def launch(self, name: str, grid: list[int], slots: list[int], ints: list[int]) -> None:
        tail = join(len(slots), *slots, len(ints), *ints)
        self.instructions.append(f"launch {name} {join(*grid)} {tail}")

    def loop(self, count: int, index: int, length: int, pairs: list[tuple[int, int]]) -> None:
        """The next ``length`` instructions are a loop with the trip count in register ``count``."""
        slots = [slot for pair in pairs for slot in pair]
        self.instructions.append(f"loop {join(count, index, length, len(pairs), *slots)}")

    def when(self, reg: int) -> None:
        """The last instruction only runs where this register is not 0."""
        self.instructions[-1] = f"when {reg} {self.instructions[-1]}"

    def text(self, version: int = 1) -> str:
        lines = [f"blade.disc {version}", f"isa {self.isa}".rstrip()]
        lines += [f"inputs {len(self.inputs)}"]
        lines += [f"input {i} {text}" for i, text in enumerate(self.inputs)]
        lines += [f"registers {len(self.registers)}"]
        lines += [f"reg {i} {text}" for i, text in enumerate(self.registers)]
        lines += [f"guards {len(self.guards)}"] + [f"guard {text}" for text in self.guards]
        if self.packs:
            lines += [f"packs {len(self.packs)}", *self.packs]
        lines += [f"slots {len(self.slots)}"]
        lines += [f"slot {i} {text}" for i, text in enumerate(self.slots)]
        lines += [f"instructions {len(self.instructions)}"] + self.instructions
        lines += [f"outputs {join(len(self.outputs), *self.outputs)}", "end"]
        return "\n".join(lines) + "\n"

    def engine(self, constants=(), limits=None, object=b"", backend="disc"):
        return make_engine("test", backend, self.text(), object, constants, limits)


def join(*items: object) -> str:
    return " ".join(map(str, items))


def relu_program() -> Writer:
    """relu of a float matrix whose number of columns is even."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    zero, two = w.const(0), w.const(2)
    w.guard(w.reg(f"eq {w.reg(f'mod {columns} {two}')} {zero}"), "columns % 2 == 0")
    a = w.slot(f"input {x}")
    y = w.tensor("output", [rows, columns])
    w.call("aten::relu.out", f"t:{a}", f"t:{y}")
    w.outputs = [y]
    return w


def matrix_times_itself() -> Writer:
    """x @ x, which raises unless x is square."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    a = w.slot(f"input {x}")
    y = w.tensor("output", [rows, columns])
    w.call("aten::mm.out", f"t:{a}", f"t:{a}", f"t:{y}")
    w.outputs = [y]
    return w

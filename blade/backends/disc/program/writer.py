# SPDX-License-Identifier: Apache-2.0
"""Fused graph and instructions -> the program text that the C++ executor runs (FORMAT.md)."""

from collections.abc import Sequence

import sympy
import torch
from typing_extensions import assert_never

from blade.backends.disc.fusion.fuse import Fused
from blade.backends.disc.ir.graph import (
    Shape,
    Value,
    contiguous_strides,
    numel,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import (
    StridedView,
    row_distance,
    same,
    view_of,
)
from blade.backends.disc.program.attention_calls import write_sdpa
from blade.backends.disc.program.buffer_reuse import Liveness
from blade.backends.disc.program.call_arguments import CallArguments
from blade.backends.disc.program.conv_calls import (
    write_conv,
    write_spatial,
    write_weight_gradient,
)
from blade.backends.disc.program.input_updates import write_updates
from blade.backends.disc.program.instructions import (
    AttentionCall,
    Counters,
    Instruction,
    KernelCall,
    Launch,
    LibraryCall,
    LoopCall,
    NativeCall,
    Operand,
    PackedBuffer,
)
from blade.backends.disc.program.loops import write_loop
from blade.backends.disc.program.scaled_mm_calls import write_scaled_mm
from blade.core.reason import Code
from blade.errors import Refused
from blade.program.dtypes import DTYPES
from blade.program.registers import Registers

VERSION = 1
NUMBER = "number"
"""Stands for the device of an input without dimensions that is on the CPU and read on an accelerator."""


def write_program(
    fused: Fused, steps: Sequence[Instruction], isa: Sequence[str], devices: Sequence[str]
) -> str:
    """The text of a program that runs ``steps`` in order. ``devices``: one per input, or ``NUMBER``."""
    writer = ProgramWriter(fused, devices)
    for step in steps:
        writer.step(step)
    return writer.text(isa)


class ProgramWriter:
    def __init__(self, fused: Fused, devices: Sequence[str]) -> None:
        self.graph = fused.graph
        self.devices = devices
        self.device = next((d for d in devices if d not in ("cpu", NUMBER)), "cpu")
        self.registers = Registers()
        self.inputs: list[str] = []
        self.guards: list[str] = []
        self.packs: list[str] = []
        self.slots: list[str] = []
        self.instructions: list[str] = []
        self.first: list[str] = []  # instructions that run before ``instructions``
        self.slot_of: dict[object, int] = {}
        self.lives = Liveness()
        self.may_fail = -1  # last instruction so far that can raise
        self.constants = len(self.graph.constants)
        self.exchanged: set[int] = set()  # slots that loops write in turns
        self.returned = {view_of(v).base.id for v in self.graph.returned}  # type: ignore[union-attr]
        for value, device in zip(self.graph.inputs, devices, strict=True):
            self.input(value, device)
        self.facts()

    def input(self, value: Value, device: str) -> None:
        index = value.attrs["index"]
        form = f"{device} {len(value.shape)}" if device != NUMBER else f"{self.device} 0 {NUMBER}"
        self.inputs.append(f"input {index} {DTYPES[value.dtype]} {form}")
        for axis, dim in enumerate(value.shape):
            register = self.registers.dim(index, axis)
            if isinstance(dim, sympy.Symbol) and not self.registers.is_bound(dim):
                self.registers.bind(dim, register)
        for symbol, (owner, axis) in self.graph.origins.items():
            if owner == index and not self.registers.is_bound(symbol):
                self.registers.bind(symbol, self.registers.dim(index, axis))

    def facts(self) -> None:
        """Guards: sizes are as the graph says, and every relation that it relies on holds."""
        for value in self.graph.inputs:
            for axis, dim in enumerate(value.shape):
                have, want = self.registers.dim(value.attrs["index"], axis), self.registers.of(dim)
                if have != want:
                    text = f"size {axis} of input {value.attrs['index']} is {dim}"
                    self.guard(self.registers.compare("eq", have, want), text)
        for fact in self.graph.facts:
            if fact.relation not in (True, sympy.true):
                self.guard(self.registers.of(fact.relation), f"{fact.relation} {fact.source}")

    def guard(self, register: int, text: str) -> None:
        self.guards.append(f"guard {register} {text.strip()}")

    def slot(self, value: Value) -> int:
        """The slot of ``value``'s own buffer, for the current instruction."""
        if value.op == "packed":
            return self.pack(value.attrs["pack"])
        if value.id not in self.slot_of:
            self.slot_of[value.id] = self.add_slot(self.buffer(value))
        self.lives.touch(self.slot_of[value.id], len(self.instructions))
        return self.slot_of[value.id]

    def buffer(self, value: Value) -> str:
        if value.op == "input" and self.devices[value.attrs["index"]] not in (self.device, NUMBER):
            text = f"Input {value.attrs['index']} is on another device than what reads it."
            raise Refused(Code.UNSUPPORTED_DEVICE, text)
        if value.op in ("input", "const"):
            return f"{value.op} {value.attrs['index']}"
        if value.op == "written":
            return f"update {value.attrs['input']} again"
        kind = f"{DTYPES[value.dtype]} {len(value.shape)}"
        sizes = self.numbers(value.shape)
        if value.op in ("call", "item") and value.strides is not None:
            return " ".join(["dyn", kind, *sizes, *self.numbers(value.strides)])
        home = "output" if value.id in self.returned else "arena"
        return " ".join([home, kind, *sizes])

    def add_slot(self, text: str) -> int:
        self.slots.append(f"slot {len(self.slots)} {text}")
        return len(self.slots) - 1

    def in_arena(self, slot: int) -> bool:
        return self.slots[slot].startswith(f"slot {slot} arena ")

    def may_share(self, slot: int) -> bool:
        return self.in_arena(slot) and slot not in self.exchanged

    def numbers(self, dims: Sequence[Dim]) -> list[str]:
        return [str(self.registers.of(d)) for d in dims]

    def view(self, view: StridedView, shape: Shape) -> int:
        """A slot for ``view`` with ``shape``; the buffer's own slot if it is the same.

        The only shape of packed memory is its number of elements.
        """
        base = self.slot(view.base)
        own = view.base.strides or contiguous_strides(view.base.shape)
        shaped = view.base.op != "packed" or len(shape) == 1
        whole = shaped and view.offset == 0 and len(shape) == len(view.base.shape)
        if whole and shape == view.base.shape and same(shape, own, view.strides):
            return base
        words = [
            *self.numbers(shape),
            *self.numbers(view.strides),
            str(self.registers.of(view.offset)),
        ]
        key = f"view {base} {len(shape)} {' '.join(words)}"
        if key not in self.slot_of:
            self.slot_of[key] = self.add_slot(key)
        return self.slot_of[key]

    def seen(self, value: Value) -> int:
        view = view_of(value)
        assert view is not None, value
        return self.view(view, value.shape)

    def matrix(self, value: Value, lead: int) -> int:
        """``value`` with its axes before the last ``lead`` merged into one."""
        view = view_of(value)
        assert view is not None, value
        cut = len(value.shape) - lead
        shape = (numel(value.shape[:cut]), *value.shape[cut:])
        row = row_distance(value, cut)
        if lead == 1 and shape[0] == 1:  # BLAS checks the row stride even of a single row
            row = value.shape[-1]
        return self.view(StridedView(view.base, (row, *view.strides[cut:]), view.offset), shape)

    def step(self, step: Instruction) -> None:
        if isinstance(step, KernelCall):
            self.kernel(step)
        elif isinstance(step, NativeCall):
            self.native(step)
        elif isinstance(step, Launch):
            self.launch(step)
        elif isinstance(step, (LibraryCall, AttentionCall)):
            self.conditional(step)
        elif isinstance(step, LoopCall):
            write_loop(self, step)
        elif isinstance(step, Value):
            self.library(step)
        else:
            assert_never(step)

    def library(self, value: Value) -> None:
        """The calls of ATen ops for ``value``."""
        if value.op == "linear":
            self.linear(value)
        elif value.op == "scaled_linear":
            write_scaled_mm(self, value)
        elif value.op == "conv":
            write_conv(self, value)
        elif value.op == "conv_weight_gradient":
            write_weight_gradient(self, value)
        elif value.op == "spatial":
            write_spatial(self, value)
        elif value.op == "matmul":
            assert len(value.args) == 2, value  # with a bias code is generated
            out, a, b = (self.matrix(v, 2) for v in (value, *value.args))
            self.emit([f"call aten::bmm.out 3 t:{a} t:{b} t:{out} 0"])
        elif value.op == "call":
            self.call(value)
        elif value.op == "written":  # at an index
            self.dispatch(value, [self.slot(value), *map(self.seen, value.args)], [])
        elif value.op == "read":
            register = self.registers.of(value.attrs["symbol"])
            target = "aten::_local_scalar_dense"
            self.emit([f"call {target} 1 t:{self.seen(value.args[0])} 1 r{register}"])
        else:
            assert value.op in ("item", "carried"), value

    def kernel(self, call: KernelCall) -> None:
        words = ["kernel", call.name, *self.numbers((call.extent, call.cost, call.scratch))]
        words += [str(len(call.buffers)), *(str(self.slot(v)) for v in call.buffers)]
        words += [str(len(call.ints)), *self.numbers(call.ints)]
        for pair in call.over:
            read, written = map(self.slot, pair)
            self.lives.offer(read, written, len(self.instructions))
        self.emit(words, may_fail=call.scratch != 0)

    def emit(self, words: Sequence[str], may_fail: bool = True) -> None:
        if may_fail:
            self.may_fail = len(self.instructions)
        self.instructions.append(" ".join(words))

    def linear(self, value: Value) -> None:
        out, x = self.matrix(value, 1), self.matrix(value.args[0], 1)
        weight = view_of(value.args[1])
        assert weight is not None, value
        transposed = StridedView(weight.base, weight.strides[::-1], weight.offset)
        w = self.view(transposed, value.args[1].shape[::-1])
        if len(value.args) == 2:
            self.emit([f"call aten::mm.out 3 t:{x} t:{w} t:{out} 0"])
        else:
            bias = self.seen(value.args[2])
            tensors = f"t:{bias} t:{x} t:{w} i:1 i:1 t:{out}"
            self.emit([f"call aten::addmm.out 6 {tensors} 0"])

    def native(self, call: NativeCall) -> None:
        slots = [self.operand(o) for o in call.operands]
        words = ["kernel", call.name, *self.numbers((call.extent, call.cost, call.scratch))]
        words += [str(len(slots)), *map(str, slots), str(len(call.ints)), *self.numbers(call.ints)]
        self.offer(call, slots)
        self.emit(words, may_fail=call.scratch != 0)

    def launch(self, call: Launch) -> None:
        for place, number in call.filled:
            slot = self.operand(call.operands[place])
            what = f"zero_ 1 t:{slot}" if number == 0 else f"fill_.Scalar 2 t:{slot} f:{number!r}"
            self.emit([*self.condition(call.when), "call", f"aten::{what}", "0"], may_fail=False)
        slots = [self.operand(o) for o in call.operands]
        words = [*self.condition(call.when), "launch", call.name, *self.numbers(call.grid)]
        words += [str(len(slots)), *map(str, slots), str(len(call.ints)), *self.numbers(call.ints)]
        if (
            call.when is None
        ):  # alternatives under conditions read the same slots: none is the last reader
            self.offer(call, slots)
        self.emit(words, may_fail=False)

    def operand(self, operand: Operand) -> int:
        if isinstance(operand, PackedBuffer):
            return self.pack(operand)
        if isinstance(operand, Value):
            view = view_of(operand)
            if view is not None and view.base.op == "packed" and view.offset == 0:
                return self.slot(view.base)  # kernels only take addresses
            return self.seen(operand)
        if operand not in self.slot_of:
            counts = isinstance(operand, Counters)
            kind = DTYPES[torch.int32 if isinstance(operand, Counters) else operand.dtype]
            slot = self.add_slot(f"arena {kind} 1 {self.registers.of(operand.numel)}")
            self.slot_of[operand] = slot
            if counts:
                self.first.append(f"call aten::zero_ 1 t:{slot} 0")
        self.lives.touch(self.slot_of[operand], len(self.instructions))
        return self.slot_of[operand]

    def conditional(self, call: LibraryCall | AttentionCall) -> None:
        """The instructions of ``call.value``, each under the condition."""
        first = len(self.instructions)
        if isinstance(call, AttentionCall):
            write_sdpa(self, call.value, call.kernel)
        else:
            self.step(call.value)
        prefix = " ".join(self.condition(call.when))
        self.instructions[first:] = [f"{prefix} {line}" for line in self.instructions[first:]]

    def condition(self, when: sympy.Basic | None) -> list[str]:
        return [] if when is None else ["when", str(self.registers.of(when))]

    def offer(self, call: NativeCall | Launch, slots: Sequence[int]) -> None:
        """Let each result of ``call`` reuse the bytes of an operand that dies."""
        for read, written in call.over:
            if list(map(_base, call.operands)).count(_base(call.operands[read])) == 1:
                self.lives.offer(slots[read], slots[written], len(self.instructions))

    def pack(self, packed: PackedBuffer) -> int:
        """The slot of a constant that is packed once per engine."""
        if packed not in self.slot_of:
            index = self.constants + len(self.packs)
            words = [packed.kernel, DTYPES[packed.dtype], packed.numel, len(packed.fills)]
            for fill in packed.fills:
                words += [fill.constant, fill.extent, len(fill.ints), *fill.ints]
            self.packs.append(f"pack {' '.join(map(str, words))}")
            self.slot_of[packed] = self.add_slot(f"const {index}")
        return self.slot_of[packed]

    def call(self, value: Value) -> None:
        taken = (
            value.args[:-1] if value.attrs.get("draw") else value.args
        )  # without the preceding draw
        tensors = [self.seen(a) for a in taken]
        self.dispatch(value, tensors, self.results(value))

    def dispatch(self, value: Value, tensors: Sequence[int], results: Sequence[str]) -> None:
        """The ATen op of ``value`` from ``tensors`` to ``results``."""
        target = value.attrs["target"]
        types = [a.type for a in target._schema.arguments]
        words = [
            CallArguments(self, tensors).word(t, kind)
            for t, kind in zip(value.attrs["template"], types, strict=True)
        ]
        name = f"{target._schema.name}.{target._overloadname}".removesuffix(".default")
        draw = ["draw"] if "draw" in value.attrs else []
        self.emit([*draw, "call", name, str(len(words)), *words, str(len(results)), *results])

    def results(self, call: Value) -> list[str]:
        """A slot per result of ``call`` up to the last one read; `-` for unread ones.

        An op may leave an unrequested result undefined, and torch's shape functions do not know the sizes
        of embedding_bag's bookkeeping results.
        """
        returns = call.attrs["target"]._schema.returns
        if [str(r.type) for r in returns] == ["Tensor"]:
            return [str(self.slot(call))]
        items = {
            v.attrs["index"]: v for v in self.graph.values if v.op == "item" and v.args[0] is call
        }
        slots = {k: str(self.slot(items[k])) for k in sorted(items)}
        return [slots.get(k, "-") for k in range(max(items, default=-1) + 1)]

    def text(self, isa: Sequence[str]) -> str:
        outputs = [self.seen(v) for v in self.graph.returned]
        write_updates(self)
        for slot, other in self.lives.reused(self.may_share).items():
            self.slots[slot] += f" reuse {other}"
        registers = [f"reg {k} {line}" for k, line in enumerate(self.registers.lines)]
        lines = [f"blade.disc {VERSION}", " ".join(["isa", *isa])]
        for name, items in (
            ("inputs", self.inputs),
            ("registers", registers),
            ("guards", self.guards),
            ("packs", self.packs),
            ("slots", self.slots),
            ("instructions", [*self.first, *self.instructions]),
        ):
            if items or name != "packs":
                lines += [f"{name} {len(items)}", *items]
        lines += [" ".join(["outputs", str(len(outputs)), *map(str, outputs)]), "end"]
        return "\n".join(lines) + "\n"


def _base(operand: Operand) -> Value | None:
    """The value whose memory ``operand`` lies in; ``None`` for memory of no value."""
    view = view_of(operand) if isinstance(operand, Value) else None
    return None if view is None else view.base

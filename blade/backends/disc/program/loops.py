# SPDX-License-Identifier: Apache-2.0
"""A loop in the program: one instruction, then those of its body.

    loop 4 9 3 1 5 6          register 4 says how often, 9 is the index; three instructions; slots 5 and 6 in turns

The state has two buffers: each iteration reads one and writes the other, then they exchange their memory. A
result of each iteration is written to its place among those of all iterations.
"""

from typing import TYPE_CHECKING

import sympy

from blade.backends.disc.ir.graph import Value, contiguous_strides, numel, plain
from blade.backends.disc.ir.loop import body_of
from blade.backends.disc.program.instructions import LoopCall
from blade.program.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter


def write_loop(writer: "ProgramWriter", call: LoopCall) -> None:
    """The instructions of ``call``, and the slots of its results."""
    loop, body = call.value, body_of(call.value)
    begin = len(writer.instructions)
    count, index = writer.registers.of(loop.attrs["count"]), writer.registers.index(body.index)
    given = [writer.seen(a) for a in loop.args]
    writer.emit(["loop"])
    pairs = []
    slots: dict[object, int] = {
        value.id: slot for value, slot in zip(call.body.graph.inputs, given, strict=True)
    }
    for k, new in enumerate(call.body.graph.outputs):
        if k < body.carried:
            slots[new.id] = other = _twin(writer, given[k])
            pairs += [given[k], other]
        else:
            slots[new.id] = _place(writer, loop, k - body.carried, new)
    _place_states(writer, loop, given)
    _write_body(writer, call, slots)
    length = len(writer.instructions) - begin - 1
    for slot in pairs:
        writer.lives.touch(slot, begin)
        writer.lives.touch(slot, begin + length)
    writer.exchanged.update(pairs)
    writer.lives.span(begin, begin + length)
    words = ["loop", count, index, length, len(pairs) // 2, *pairs]
    writer.instructions[begin] = " ".join(map(str, words))
    writer.may_fail = len(writer.instructions) - 1


def _twin(writer: "ProgramWriter", slot: int) -> int:
    """A slot of the form of ``slot``, which is the arena's."""
    assert writer.in_arena(slot), writer.slots[slot]
    _, _, form = writer.slots[slot].split(" ", 2)
    return writer.add_slot(form)


def _place(writer: "ProgramWriter", loop: Value, index: int, new: Value) -> int:
    """The slot of an iteration's result: a part of the buffer for all iterations."""
    whole = next((i for i in _results(writer, loop, "item") if i.attrs["index"] == index), None)
    if whole is None:  # nobody reads it
        return writer.add_slot(
            " ".join(["arena", DTYPES[new.dtype], str(len(new.shape)), *writer.numbers(new.shape)])
        )
    base = writer.slot(whole)
    words = [*writer.numbers(new.shape), *writer.numbers(contiguous_strides(new.shape))]
    place = body_of(loop).place(loop.attrs["count"])
    offset = writer.registers.of(plain(sympy.sympify(place) * numel(new.shape)))
    return writer.add_slot(f"view {base} {len(new.shape)} {' '.join([*words, str(offset)])}")


def _place_states(writer: "ProgramWriter", loop: Value, given: list[int]) -> None:
    for state in _results(writer, loop, "carried"):
        writer.slot_of[state.id] = given[state.attrs["index"]]


def _results(writer: "ProgramWriter", loop: Value, op: str) -> list[Value]:
    return [v for v in writer.graph.values if v.op == op and v.args[0] is loop]


def _write_body(writer: "ProgramWriter", call: LoopCall, slots: dict[object, int]) -> None:
    """The body's instructions: its values are numbered anew, all else is the program's."""
    graph, returned, own = writer.graph, writer.returned, writer.slot_of
    shared = {k: slot for k, slot in own.items() if not isinstance(k, int)}
    writer.graph, writer.returned, writer.slot_of = call.body.graph, set(), {**shared, **slots}
    for step in call.steps:
        writer.step(step)
    found = {k: slot for k, slot in writer.slot_of.items() if not isinstance(k, int)}
    writer.graph, writer.returned, writer.slot_of = graph, returned, {**own, **found}

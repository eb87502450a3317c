# SPDX-License-Identifier: Apache-2.0
"""Updates of inputs: computed in place if that is known to be safe, else in a buffer and copied.

    %2 = add %0 %1         ->     slot 2 update 0
    update %0 %2                  kernel loop_1 .. 3 0 1 2 ..        stores over what it reads

An input is written only after its last read and after the last instruction that can fail: the fallback
then still finds the original contents. So values that only updates need are computed last
(``updates_last``). A part that nothing reads before it is written (``update_in_place``) may be written at any time,
because the fallback writes it again: its slot is ``update I again``.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, FusionUnit
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter


def updates_last(fused: Fused) -> Fused:
    """Move groups that only updates need behind all other units, in the same order."""
    graph = fused.graph
    if not graph.updates:
        return fused
    needed: set[int] = set()
    stack = [*graph.returned, *(u for u in fused.units if isinstance(u, Value))]
    while stack:
        value = stack.pop()
        if value.id not in needed:
            group = fused.group_of.get(value.id)
            members = [value] if group is None else group.members
            needed.update(m.id for m in members)
            stack += [a for m in members for a in m.args]

    def is_late(unit: FusionUnit) -> bool:
        return isinstance(unit, FusionGroup) and unit.members[0].id not in needed

    units = sorted(fused.units, key=is_late)
    return replace(fused, units=tuple(units))


def write_updates(writer: "ProgramWriter") -> None:
    """The end of a program: ``slot K update I`` in place of a buffer, or a copy from it."""
    copied = []
    taken: set[int] = set()
    for value, into in writer.graph.updated:
        if value.op == "written" and value.attrs["input"] == into.attrs["index"]:
            continue
        view = view_of(value)
        assert view is not None and value.shape == into.shape and value.dtype == into.dtype, value
        slot = writer.seen(value)
        if slot not in taken and _is_in_place(writer, value, slot, into):
            taken.add(slot)
            writer.slots[slot] = f"slot {slot} update {into.attrs['index']}"
        else:
            copied.append((slot, into))
    for slot, into in copied:
        target = writer.add_slot(f"update {into.attrs['index']}")
        writer.emit([f"call aten::copy_ 3 t:{target} t:{slot} b:0 0"])


def _is_in_place(writer: "ProgramWriter", value: Value, slot: int, into: Value) -> bool:
    """Whether the buffer of ``value`` may be the memory of the input ``into`` from its first
    instruction on.
    """
    view = view_of(value)
    assert view is not None
    if not writer.in_arena(slot) or slot != writer.slot_of.get(view.base.id):
        return False
    late = writer.lives.first[slot] > writer.may_fail
    read = writer.slot_of.get(into.id)
    return late and (read is None or writer.lives.may_take(read, slot))

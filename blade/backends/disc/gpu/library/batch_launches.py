# SPDX-License-Identifier: Apache-2.0
"""One launch for many small equal launches, such as the casts of all parameters to 16 bits.

    steps = batch_launches(steps, units, note)

A training step in mixed precision converts hundreds of parameters with equal functions and sizes, and a
launch takes longer than most conversions. Launches are merged if no step between them depends on them; the
second grid axis selects the pointers of a block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from typing_extensions import assert_never

from blade.backends.disc.gpu.compile.triton_unit import TritonUnit, named_unit
from blade.backends.disc.ir.graph import Value, numel
from blade.backends.disc.ir.views import memory_of
from blade.backends.disc.program.instructions import (
    AttentionCall,
    Instruction,
    KernelCall,
    Launch,
    LibraryCall,
    LoopCall,
    NativeCall,
    Operand,
)

# Elements of small operands, at most: a larger copy takes longer than its launch and lives longer.
LARGEST = 1 << 20
MOST_POINTERS = 128  # per launch
SIZES = (32, 16, 8, 4, 2)  # launches per batch; few sizes need few compiled functions
Key = tuple[Any, ...]


def batch_launches(
    steps: Sequence[Instruction],
    units: Mapping[str, TritonUnit],
    note: Callable[[TritonUnit], TritonUnit],
) -> list[Instruction]:
    """``steps`` with batches; ``note`` registers their functions."""
    uses = _uses(steps)
    together: dict[Key, list[int]] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Launch) and _may_join(step, units[step.name]):
            is_early = uses.is_early(place, step)
            if is_early or uses.is_late(place, step):
                key = (is_early, step.name, step.grid, step.ints, step.when)
                together.setdefault(key, []).append(place)
    made: dict[int, Instruction] = dict(enumerate(steps))
    for (is_early, name, *_), places in together.items():
        for part in _parts(places, units[name].pointers):
            launches = [made.pop(place) for place in part]
            made[part[0] if is_early else part[-1]] = _merged(launches, units[name], note)
    return [made[place] for place in sorted(made)]


@dataclass(frozen=True)
class _ValueUses:
    """Per value, the steps that use it; the first one computes it, unless it is an input or constant."""

    steps: Mapping[int, Sequence[int]]

    def is_early(self, place: int, launch: Launch) -> bool:
        """Are all operands of ``launch`` available when the program begins?"""
        return all(
            v.op in ("input", "const") or self.steps[v.id][0] == place for v in _values(launch)
        )

    def is_late(self, place: int, launch: Launch) -> bool:
        """Does only the caller use the results of ``launch``?"""
        made = [v for v in _values(launch) if v.op not in ("input", "const")]
        made = [v for v in made if self.steps[v.id][0] == place]
        return bool(made) and all(len(self.steps[v.id]) == 1 for v in made)


def _uses(steps: Sequence[Instruction]) -> _ValueUses:
    found: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        for value in dict.fromkeys(_touched(step)):
            found.setdefault(value.id, []).append(place)
    return _ValueUses(found)


def _touched(step: Instruction) -> Iterator[Value]:
    """The values whose memory ``step`` reads or writes."""
    if isinstance(step, LibraryCall | AttentionCall | LoopCall):
        yield from _touched(step.value)
    elif isinstance(step, Value):
        yield from map(memory_of, (step, *step.args))
    elif isinstance(step, Launch):
        yield from _values(step)
    elif isinstance(step, KernelCall | NativeCall):
        raise AssertionError(f"on a GPU there are launches alone: {step}")
    else:
        assert_never(step)


def _values(launch: Launch) -> Iterator[Value]:
    for operand in launch.operands:
        if isinstance(operand, Value):
            yield memory_of(operand)


def _may_join(launch: Launch, unit: TritonUnit) -> bool:
    """Is ``launch`` a small loop kernel that does not use the grid's second axis?"""
    if (
        launch.filled
        or not unit.name.startswith("loop_")
        or unit.constants
        or launch.grid[1:] != (1, 1)
    ):
        return False
    if "program_id(1)" in unit.text or 2 * unit.pointers > MOST_POINTERS:
        return False
    return all(_is_small(operand) for operand in launch.operands)


def _is_small(operand: Operand) -> bool:
    if (
        not isinstance(operand, Value) or operand.op == "concat"
    ):  # other launches write other parts of it
        return False
    size = sympy.sympify(numel(operand.shape))
    return bool(size.is_number and size <= LARGEST)


def _parts(places: Sequence[int], pointers: int) -> Iterator[Sequence[int]]:
    """Split ``places``, in order, into the fewest batches of the allowed sizes."""
    start = 0
    for size in SIZES:
        while size * pointers <= MOST_POINTERS and start + size <= len(places):
            yield places[start : start + size]
            start += size


def _merged(
    launches: Sequence[Instruction], unit: TritonUnit, note: Callable[[TritonUnit], TritonUnit]
) -> Launch:
    ours = [one for one in launches if isinstance(one, Launch)]
    first = ours[0]
    over = [
        (k * unit.pointers + read, k * unit.pointers + written)
        for k, one in enumerate(ours)
        for read, written in one.over
    ]
    return replace(
        first,
        name=note(several(unit, len(ours))).name,
        grid=(first.grid[0], len(ours), 1),
        operands=tuple(operand for one in ours for operand in one.operands),
        over=tuple(over),
    )


def several(unit: TritonUnit, count: int) -> TritonUnit:
    """``unit`` on ``count`` lists of pointers with equal sizes, one list per block of grid axis 1."""
    pointers, sizes = unit.signature[: unit.pointers], unit.signature[unit.pointers :]
    own = [[(f"{name}_{k}", kind) for name, kind in pointers] for k in range(count)]
    names = [name for name, _ in (*(p for one in own for p in one), *sizes)]
    lines = [
        unit.text,
        "@triton.jit",
        f"def kernel({', '.join(names)}):",
        "    k = tl.program_id(1)",
    ]
    for place, (name, _) in enumerate(pointers):
        lines.append(f"    {name} = {own[0][place][0]}")
        for k in range(1, count):
            lines.append(f"    {name} = tl.where(k == {k}, {own[k][place][0]}, {name})")
        if name in unit.aligned:
            lines.append(f"    {name} = tl.multiple_of({name}, 16)")
    lines.append(f"    {unit.name}({', '.join(name for name, _ in unit.signature)})")
    text = "\n".join([*lines, ""])
    aligned = [f"{name}_{k}" for name, _ in pointers if name in unit.aligned for k in range(count)]
    aligned += [name for name, _ in sizes if name in unit.aligned]
    return named_unit(
        f"loop{count}",
        text,
        (*(p for one in own for p in one), *sizes),
        (),
        tuple(aligned),
        unit.warps,
        unit.stages,
        unit.early,
    )

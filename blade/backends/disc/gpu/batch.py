# SPDX-License-Identifier: Apache-2.0
"""One launch for many small equal ones: every parameter's cast to 16 bits, every gradient's back.

    steps = batch(steps, units, note)

A step of mixed precision converts hundreds of parameters, each by the same function at the same size, and a launch
takes longer than most of that. Launches that nothing between them depends on become one: the second axis of its
grid says which of their pointers a block works with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from typing_extensions import assert_never

from blade.backends.disc.gpu.unit import Unit, named
from blade.backends.disc.ir import Value, numel
from blade.backends.disc.steps import (
    AttentionCall,
    KernelCall,
    Launch,
    LibraryCall,
    NativeCall,
    Operand,
    Step,
)
from blade.backends.disc.views import view_of

# Elements of what is small: a copy of more takes longer than launching it, and would be kept for longer.
LARGEST = 1 << 20
MOST_POINTERS = 128  # of a launch
SIZES = (32, 16, 8, 4, 2)  # launches in one: few sizes are few functions to compile
Key = tuple[Any, ...]


def batch(
    steps: Sequence[Step], units: Mapping[str, Unit], note: Callable[[Unit], Unit]
) -> list[Step]:
    """``steps`` with batches; ``note`` takes the functions that these need."""
    uses = _uses(steps)
    together: dict[Key, list[int]] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Launch) and _may_join(step, units[step.name]):
            is_early = uses.is_early(place, step)
            if is_early or uses.is_late(place, step):
                key = (is_early, step.name, step.grid, step.ints, step.when)
                together.setdefault(key, []).append(place)
    made: dict[int, Step] = dict(enumerate(steps))
    for (is_early, name, *_), places in together.items():
        for part in _parts(places, units[name].pointers):
            launches = [made.pop(place) for place in part]
            made[part[0] if is_early else part[-1]] = _merged(launches, units[name], note)
    return [made[place] for place in sorted(made)]


@dataclass(frozen=True)
class _Uses:
    """Which steps have a value in their hands; the first of them makes it, unless it comes from outside."""

    steps: Mapping[int, Sequence[int]]

    def is_early(self, place: int, launch: Launch) -> bool:
        """Whether all that ``launch`` reads is there when the program begins."""
        return all(
            v.op in ("input", "const") or self.steps[v.id][0] == place for v in _values(launch)
        )

    def is_late(self, place: int, launch: Launch) -> bool:
        """Whether nothing takes what ``launch`` makes, but the caller."""
        made = [v for v in _values(launch) if v.op not in ("input", "const")]
        made = [v for v in made if self.steps[v.id][0] == place]
        return bool(made) and all(len(self.steps[v.id]) == 1 for v in made)


def _uses(steps: Sequence[Step]) -> _Uses:
    found: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        for value in dict.fromkeys(_touched(step)):
            found.setdefault(value.id, []).append(place)
    return _Uses(found)


def _touched(step: Step) -> Iterator[Value]:
    """The values whose memory ``step`` reads or writes."""
    if isinstance(step, LibraryCall | AttentionCall):
        yield from _touched(step.value)
    elif isinstance(step, Value):
        for one in (step, *step.args):
            view = view_of(one)
            yield one if view is None else view.base
    elif isinstance(step, Launch):
        yield from _values(step)
    elif isinstance(step, KernelCall | NativeCall):
        raise AssertionError(f"on a GPU there are launches alone: {step}")
    else:
        assert_never(step)


def _values(launch: Launch) -> Iterator[Value]:
    for operand in launch.operands:
        if isinstance(operand, Value):
            view = view_of(operand)
            yield operand if view is None else view.base


def _may_join(launch: Launch, unit: Unit) -> bool:
    """Whether ``launch`` is small, one of loops, and does not know of the grid's second axis."""
    if not unit.name.startswith("loop_") or unit.constants or launch.grid[1:] != (1, 1):
        return False
    if "program_id(1)" in unit.text or 2 * unit.pointers > MOST_POINTERS:
        return False
    return all(_is_small(operand) for operand in launch.operands)


def _is_small(operand: Operand) -> bool:
    if (
        not isinstance(operand, Value) or operand.op == "concat"
    ):  # of which others write other parts
        return False
    size = sympy.sympify(numel(operand.shape))
    return bool(size.is_number and size <= LARGEST)


def _parts(places: Sequence[int], pointers: int) -> Iterator[Sequence[int]]:
    """``places``, in order, in as few batches as their sizes allow."""
    start = 0
    for size in SIZES:
        while size * pointers <= MOST_POINTERS and start + size <= len(places):
            yield places[start : start + size]
            start += size


def _merged(launches: Sequence[Step], unit: Unit, note: Callable[[Unit], Unit]) -> Launch:
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


def several(unit: Unit, count: int) -> Unit:
    """``unit`` on ``count`` lists of pointers, one after the other, and the same sizes: a list per block of axis 1."""
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
    return named(
        f"loop{count}",
        text,
        (*(p for one in own for p in one), *sizes),
        (),
        tuple(aligned),
        unit.warps,
        unit.stages,
        unit.early,
    )

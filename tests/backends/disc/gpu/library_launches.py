# SPDX-License-Identifier: Apache-2.0
"""Runs the launches of library instructions in Triton's interpreter, and compiles them for a real device.

run(launches, {x.id: tensor, out.id: result}, {"s0": 2})      # buffers by the id of the value they belong to
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cpu_native import evaluate
from triton_interpreter import _int64, load

from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import Counters, ScratchBuffer

Operand = Value | ScratchBuffer | Counters


def run(
    launches: Sequence[LibraryLaunch], buffers: Mapping[int, torch.Tensor], sizes: Mapping[str, int]
) -> list[LibraryLaunch]:
    """Those that ran. Scratch is full of NaN before, counters are zero before and after."""
    made: dict[int, torch.Tensor] = {}
    counters: dict[int, torch.Tensor] = {}

    def memory(operand: Operand) -> torch.Tensor:
        if isinstance(operand, Value):
            view = view_of(operand)
            assert view is not None, operand
            return buffers[view.base.id].view(-1)[evaluate(view.offset, sizes) :]
        if isinstance(operand, Counters):
            return counters.setdefault(id(operand), torch.zeros(operand.numel, dtype=torch.int32))
        if id(operand) not in made:
            numel = evaluate(operand.numel, sizes)
            nothing = float("nan") if operand.dtype.is_floating_point else -(1 << 30)
            made[id(operand)] = torch.full((numel,), nothing, dtype=operand.dtype)
        return made[id(operand)]

    ran = [launch for launch in launches if holds(launch, sizes)]
    for launch in ran:
        unit, grid = launch.choice.unit, tuple(evaluate(d, sizes) for d in launch.choice.grid)
        if 0 in grid:
            continue
        ints: list[Any] = [_int64(evaluate(d, sizes)) for d in launch.ints]
        given = zip(unit.signature, [*map(memory, launch.operands), *ints], strict=True)
        named = {name: value for (name, _), value in given}
        with np.errstate(all="ignore"):
            getattr(load(unit), unit.name)[grid](**named, **dict(unit.constants))
    assert not any(x.any() for x in counters.values())
    return ran


def holds(launch: LibraryLaunch, sizes: Mapping[str, int]) -> bool:
    when = launch.choice.when
    if when is None:
        return True
    return bool(when.subs({s: sizes[str(s)] for s in when.free_symbols}))

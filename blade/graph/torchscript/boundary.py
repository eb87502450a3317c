# SPDX-License-Identifier: Apache-2.0
"""The boundary of a group: tensors and plain numbers in, tensors out, and the weights that it holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from blade.graph.torchscript.program import Program
from blade.graph.torchscript.view import GraphView


@dataclass(frozen=True)
class Boundary:
    """``lines`` in program order, those in loops left out; ``constants[j]`` is the tensor ``tensors[slots[j]]``.

    Two constants of the graph that are one tensor (tied weights) get one slot. ``read_at[i]`` is the first
    line of the group that needs ``inputs[i]``.
    """

    nodes: tuple[int, ...]
    lines: tuple[int, ...]
    inputs: tuple[int, ...]
    read_at: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    slots: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


def find_boundary(view: GraphView, group: Sequence[int]) -> Boundary:
    """The boundary of ``group`` (node indices of ``view``)."""
    program = view.program
    outer = view.outermost(group)
    nodes = view.with_bodies(outer)
    lines = tuple(sorted(i for n in outer for i in view.units[n].lines))
    inside = {n for i in lines for n in (i, *_lines_within(program, i))}
    own = dict.fromkeys(v for i in lines for v in program.lines[i].outputs)
    needed: dict[int, int] = {}
    constants: dict[int, None] = {}
    for index in lines:
        for value in program.lines[index].reads:
            crosses = value in view.scalars.get(index, ())
            for source in (value,) if crosses else view.sources(value):
                needed.setdefault(source, index)
            constants.update(dict.fromkeys(_tensor_constants(view, value)))
    slots, tensors = _deduplicate([view.program.tensor_constant(v) for v in constants])
    return Boundary(
        nodes=nodes,
        lines=lines,
        inputs=tuple(v for v in needed if v not in own),
        read_at=tuple(at for v, at in needed.items() if v not in own),
        outputs=tuple(v for v in own if _used_outside(view, v, inside)),
        constants=tuple(constants),
        slots=slots,
        tensors=tensors,
    )


def _lines_within(program: Program, line: int) -> Iterator[int]:
    """The lines in the blocks of ``line``."""
    for block in program.lines[line].blocks:
        for inner in program.blocks[block].lines:
            yield inner
            yield from _lines_within(program, inner)


def _tensor_constants(view: GraphView, value: int) -> list[int]:
    """Tensor constants that ``value`` needs, directly or through scalar lines."""
    program = view.program
    found: list[int] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        line = program.maker(current)
        if current in seen or line is None or line.index not in view.scalar_lines:
            continue
        seen.add(current)
        if program.tensor_constant(current) is not None:
            found.append(current)
        pending.extend(reversed(line.reads))
    return found


def _deduplicate(
    held: Sequence[torch.Tensor | None],
) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    tensors: list[torch.Tensor] = []
    seen: dict[object, int] = {}
    slots: list[int] = []
    for tensor in held:
        assert tensor is not None
        key = identity(tensor)
        if key not in seen:
            seen[key] = len(tensors)
            tensors.append(tensor)
        slots.append(seen[key])
    return tuple(slots), tuple(tensors)


def identity(tensor: torch.Tensor) -> object:
    """A key, equal for tensors over the same bytes with the same view."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride(),
    )


def _used_outside(view: GraphView, value: int, inside: set[int]) -> bool:
    readers = view.readers.get(value, ())
    return any(line not in inside for line in readers)

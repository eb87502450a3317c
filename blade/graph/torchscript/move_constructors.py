# SPDX-License-Identifier: Apache-2.0
"""Makes tables of indices and masks where they are used: on the accelerator instead of the CPU.

    index = arange(n)[:, None] - arange(n); bias = table[index]     # table on a GPU: a copy in every call
    index = arange(n, device=table.device)[:, None] - arange(n, device=table.device); bias = table[index]

Models make such tensors of sizes alone and forget the device. Each costs a copy that a GPU waits for, which a CUDA
graph cannot hold and which cuts the cluster. Only those move of which nothing else is read on the CPU. Every device
computes integers and booleans alike. Floats (buckets of relative positions, a scale) move where the device is seen to
give the same: of buckets, which a rounding may change, the same at every element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from blade.core.pytree import tensors_in
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.describe import ObservedFacts
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.observe_values import observe_facts, observe_tensors
from blade.graph.torchscript.program import Line, Program, read

_EXACT = (
    *(torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64),
)
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "arange cat clone contiguous detach empty_like expand expand_as flatten flip full full_like index_select max "
        "meshgrid min ones ones_like permute repeat reshape scalar_tensor select slice squeeze stack t to transpose "
        "type_as unsqueeze view view_as zeros zeros_like".split()
    )
)
"""Ops beside pointwise ones whose floats do not depend on an order of summation."""
_ROUNDINGS = 4
"""Units in the last place between floats of two devices."""
_LISTS = ("prim::ListConstruct", "prim::ListUnpack")
_SIZES = ("aten::size", "aten::dim", "aten::numel", "aten::len", "aten::sym_size", "prim::dtype")
_FILLS = ("aten::fill", "aten::masked_fill", "aten::copy")
_CPU = torch.device("cpu")


def move_constructors(
    module: torch.jit.ScriptModule,
    samples: Sequence[Sequence[Any]],
    probes: Sequence[Sequence[Any]] = (),
) -> None:
    """Move them in ``module``'s forward, whose values are observed at ``samples`` and ``probes``."""
    if not any(t.device != _CPU for t in _all_tensors(module, samples)):
        return
    program = read(module.graph)
    if not any(_makes_from_sizes(program, line) for line in program.lines):
        return
    facts = ObservedFacts(program, observe_facts(program, module, [*samples, *probes]))
    devices = {fact.device for run in facts.runs for seen in run.values() for fact in seen}
    devices -= {_CPU}
    if len(devices) != 1:
        return
    [device] = devices
    exact = _Constructors(program, facts, device, with_floats=False).find()
    floats = _Constructors(program, facts, device, with_floats=True).find()
    if len(floats) > len(exact):
        read_there = _read_elsewhere(program, floats)
        before = _values(program, module, [*samples, *probes], read_there)
        undo = [edit for line in floats for edit in _place(program, line, device)]
        after = _values(read(module.graph), module, [*samples, *probes], read_there)
        if _are_alike(before, after):
            return
        for node, place, value in undo:
            node.replaceInput(place, value)
    for line in exact:
        _place(program, line, device)


def _read_elsewhere(program: Program, moved: Sequence[Line]) -> dict[str, str]:
    """Names of values of ``moved`` lines that others read, with the name of a value that such a reader makes."""
    inside = {line.index for line in moved}
    found = {}
    for line in moved:
        for value in filter(program.is_tensor, line.outputs):
            for user in program.users_of(value):
                if user.index not in inside and user.outputs:
                    made = program.values[user.outputs[0]]
                    found[program.values[value].debugName()] = made.debugName()
    return found


def _values(
    program: Program,
    module: torch.jit.ScriptModule,
    samples: Sequence[Sequence[Any]],
    read_there: Mapping[str, str],
) -> list[list[torch.Tensor]]:
    """What the readers get in each run, on the CPU."""
    names = {value.debugName(): k for k, value in program.values.items()}
    wanted: dict[int, list[tuple[int, bool]]] = {}
    for value, made in read_there.items():
        wanted.setdefault(program.producer[names[made]], []).append((names[value], False))
    runs = []
    for sample in samples:
        seen = observe_tensors(program, module, sample, wanted)
        runs.append([one.cpu() for key in sorted(seen) for one in seen[key]])
    return runs


def _are_alike(before: list[list[torch.Tensor]], after: list[list[torch.Tensor]]) -> bool:
    """Whether whole numbers are equal and floats a few roundings apart."""
    pairs = [pair for runs in zip(before, after, strict=True) for pair in zip(*runs, strict=True)]
    return all(
        one.shape == other.shape
        and torch.allclose(one, other, rtol=_rounding(one), atol=0.0, equal_nan=True)
        for one, other in pairs
    )


def _rounding(value: torch.Tensor) -> float:
    kind = value.dtype
    return _ROUNDINGS * torch.finfo(kind).eps if kind.is_floating_point else 0.0


def _all_tensors(
    module: torch.jit.ScriptModule, samples: Sequence[Sequence[Any]]
) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for sample in samples:
        yield from tensors_in(sample)


def _device_places(line: Line) -> list[int]:
    overload = resolve(line.node)
    if overload is None:
        return []
    arguments = overload._schema.arguments
    return [k for k, one in enumerate(arguments) if str(one.type) in ("Optional[Device]", "Device")]


def _makes_from_sizes(program: Program, line: Line) -> bool:
    """Whether ``line`` makes a tensor of the CPU of numbers alone."""
    if any(_holds_tensors(program, v) for v in line.inputs):
        return False
    places = _device_places(line)
    return len(places) == 1 and _is_cpu(program, line.inputs[places[0]])


def _is_cpu(program: Program, value: int) -> bool:
    return program.constant(value) and program.held(value) in (None, _CPU)


def _holds_tensors(program: Program, value: int) -> bool:
    kind = program.values[value].type()
    return program.is_tensor(value) or "Tensor" in str(kind)


class _Constructors:
    """The lines to move to ``device``."""

    def __init__(
        self, program: Program, facts: ObservedFacts, device: torch.device, with_floats: bool
    ) -> None:
        self.program, self.facts, self.device = program, facts, device
        self.with_floats = with_floats
        self.moved: set[int] = set()

    def find(self) -> list[Line]:
        lines = self.program.lines
        for line in lines:
            if self._may_move(line):
                self.moved.add(line.index)
        before = -1
        while len(self.moved) != before:
            before = len(self.moved)
            self.moved -= {i for i in self.moved if not self._is_free(lines[i])}
        return [lines[i] for i in sorted(self.moved)]

    def _may_move(self, line: Line) -> bool:
        if line.blocks or not line.outputs:
            return False
        if line.kind not in _LISTS and not _is_pure(line):
            return False
        if not all(_holds_tensors(self.program, v) for v in line.outputs):
            return False
        made = [v for v in line.outputs if self.program.is_tensor(v)]
        if not all(self._is_alike(line, v) for v in made):
            return False
        if _makes_from_sizes(self.program, line):
            return True
        given = [v for v in line.inputs if _holds_tensors(self.program, v)]
        moved = [v for v in given if self.program.producer.get(v) in self.moved]
        others = [v for v in given if v not in moved]
        return bool(moved) and all(self._is_number(v, line) for v in others)

    def _is_alike(self, line: Line, value: int) -> bool:
        """Whether ``line`` makes ``value`` on the CPU, of a type and in a way that may move."""
        info = self.facts.info(value)
        if info.device != _CPU or info.dtype in _EXACT:
            return info.device == _CPU
        is_float = info.dtype is not None and info.dtype.is_floating_point
        return self.with_floats and is_float and (line.kind in _MOVES or _is_pointwise(line))

    def _is_number(self, value: int, line: Line) -> bool:
        """Whether ``value`` is a tensor without axes, which ``line`` takes beside tensors of any device, or none."""
        if self.program.constant(value):
            held = self.program.tensor_constant(value)
            return held is None or held.dim() == 0
        info = self.facts.info(value)
        takes_numbers = _is_pointwise(line) or line.kind in _FILLS
        return takes_numbers and info.device == _CPU and info.rank == 0

    def _is_free(self, line: Line) -> bool:
        """Whether what ``line`` reads moves too, and what it makes is read where it moves to."""
        if any(v in self.program.returned for v in line.outputs):
            return False
        for value in line.inputs:
            maker = self.program.maker(value)
            if not _holds_tensors(self.program, value) or self._is_number(value, line):
                continue
            if maker is None or maker.index not in self.moved:
                return False
        return all(
            user.index in self.moved or self._reads_anywhere(user)
            for value in line.outputs
            for user in self.program.users_of(value)
            if not user.blocks
        )

    def _reads_anywhere(self, line: Line) -> bool:
        """Whether ``line`` gives the same if its arguments of the CPU are on the device."""
        if line.kind in _SIZES:
            return True
        if line.kind in _LISTS:
            return all(
                self._reads_anywhere(user)
                for v in line.outputs
                for user in self.program.users_of(v)
            ) and not any(v in self.program.returned for v in line.outputs)
        made = [v for v in line.outputs if self.program.is_tensor(v)]
        on_device = made and all(self.facts.info(v).device == self.device for v in made)
        return bool(on_device) and len(made) == len(line.outputs) and _is_pure(line)


def _is_pointwise(line: Line) -> bool:
    overload = resolve(line.node)
    return overload is not None and torch.Tag.pointwise in overload.tags


def _is_pure(line: Line) -> bool:
    overload = resolve(line.node)
    return (
        overload is not None
        and not overload._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in overload.tags
    )


def _place(
    program: Program, line: Line, device: torch.device
) -> list[tuple[torch._C.Node, int, torch._C.Value]]:
    """Make ``line`` compute on ``device``. Without an explicit one, a line follows its tensors.

    Return the node, the position and the former value of each input that changed.
    """
    changed = []
    follows = any(_holds_tensors(program, v) for v in line.inputs)
    for place in _device_places(line):
        given = line.inputs[place]
        if _is_cpu(program, given) and not (follows and program.held(given) is None):
            insert = Inserter(program.graph, line.node)
            line.node.replaceInput(place, insert.constant(device))
            changed.append((line.node, place, program.values[given]))
    return changed

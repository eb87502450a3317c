# SPDX-License-Identifier: Apache-2.0
"""Runs a copy of a graph to observe its values: first their facts, later the tensors themselves.

The copy calls blade's own op ``blade_graph::note`` on each watched value, inside the blocks of Ifs and
Loops too, which run as often as they run in the model. ``observe_facts`` keeps no intermediate alive.
``observe_tensors`` keeps chosen tensors as they are when the program reaches a given line, because a later
in-place op must not be seen.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blade.core import torchscript
from blade.graph.shapes.memory_format import dense_order
from blade.graph.shapes.observed_layout import ObservedRun, TensorMeta
from blade.graph.torchscript.copier import Copier
from blade.graph.torchscript.program import (
    TENSOR,
    Block,
    Line,
    Program,
)
from blade.process.torch_state import seeded_generators
from blade.timing.free_cpus import on_free_cpus

LIMIT = 3
"""Executions of a line in a loop that are recorded per run, for tensors."""

KEPT = 256 << 20
"""Most bytes of results that are kept."""

_FACTS_LIMIT = 16

Note = Callable[[int, torch.Tensor], None]

_LIBRARY = torch.library.Library("blade_graph", "DEF")
# Conservative, so that no pass removes or moves it.
_LIBRARY.define("note(Tensor value, int run, int key) -> ()", alias_analysis="CONSERVATIVE")
_running: dict[int, Note] = {}
_runs = itertools.count()


def _note(value: torch.Tensor | None, run: int, key: int) -> None:
    # None: an undefined result (unused attention weights). Nested tensors have no sizes.
    if value is not None and not value.is_nested:
        _running[run](key, value)


for _key in (
    "CompositeExplicitAutograd",
    "NestedTensorCPU",
    "NestedTensorCUDA",
    "AutogradNestedTensor",
):
    _LIBRARY.impl("note", _note, _key)


@dataclass
class KeptResults:
    """The tensors of ``values`` that lie on the CPU, in each run: ``runs[0][value]``.

    Once they take more than ``KEPT`` bytes, there are none.
    """

    values: frozenset[int]
    runs: list[dict[int, torch.Tensor]] = field(default_factory=list)

    def begin_run(self) -> None:
        """What is noted from now on is of one more run."""
        self.runs.append({})

    def note(self, value: int, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` if it is wanted."""
        if value not in self.values or not tensor.is_cpu:
            return
        self.runs[-1][value] = tensor.detach()
        if sum(t.numel() * t.element_size() for run in self.runs for t in run.values()) > KEPT:
            self.values = frozenset()
            for run in self.runs:
                run.clear()


def observe_facts(
    program: Program,
    module: torch.jit.ScriptModule,
    samples: Iterable[Sequence[Any]],
    kept: KeptResults | None = None,
) -> tuple[ObservedRun, ...]:
    """Facts of every tensor, in all blocks, when ``module``'s forward runs on each of ``samples``; ``kept`` keeps
    some of the tensors themselves."""
    kept = KeptResults(frozenset()) if kept is None else kept
    absent = _may_be_absent(program)

    def watch(run: _InstrumentedModule, values: Sequence[int]) -> None:
        for value in values:
            if program.values[value].type().kind() == "TensorType" and value not in absent:
                run.note(run.copier.known[value], value)

    run = _InstrumentedModule(program)
    run.write(
        enter=lambda block: watch(run, block.inputs),
        after=lambda line: watch(run, () if line.kind == "prim::Constant" else line.outputs),
    )
    return tuple(_facts(run, module, sample, kept) for sample in samples)


def _facts(
    run: _InstrumentedModule,
    module: torch.jit.ScriptModule,
    sample: Sequence[Any],
    kept: KeptResults,
) -> ObservedRun:
    seen: dict[int, dict[TensorMeta, None]] = {}
    kept.begin_run()

    def note(key: int, value: torch.Tensor) -> None:
        facts = seen.setdefault(key, {})
        if len(facts) < _FACTS_LIMIT:
            order = dense_order(value)
            facts[TensorMeta(tuple(value.shape), value.dtype, value.device, order)] = None
        kept.note(key, value)

    run.run(module, sample, note)
    return {value: tuple(facts) for value, facts in seen.items()}


def _may_be_absent(program: Program) -> set[int]:
    """Values that are uninitialized on a branch of scripted code that does not need them."""
    absent = {
        v for line in program.lines if line.kind == "prim::Uninitialized" for v in line.outputs
    }
    before = -1
    while len(absent) != before:
        before = len(absent)
        for line in program.lines:
            for block in (program.blocks[b] for b in line.blocks):
                is_loop = line.kind == "prim::Loop"
                returned = block.returns[1:] if is_loop else block.returns
                pairs = list(zip(line.outputs, returned, strict=True))
                if is_loop:
                    pairs += zip(block.inputs[1:], returned, strict=True)
                    pairs += zip(block.inputs[1:], line.inputs[2:], strict=True)
                    pairs += zip(line.outputs, line.inputs[2:], strict=True)
                absent.update(made for made, source in pairs if source in absent)
    return absent


def observe_tensors(
    program: Program,
    module: torch.jit.ScriptModule,
    sample: Sequence[Any],
    wanted: Mapping[int, Sequence[tuple[int, bool]]],
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Tensors just before chosen lines: ``wanted[line] = [(value, copy it), ...]``.

    Keys of the result are (line, value); each holds one tensor per execution of the line, for the first
    ``LIMIT`` executions. Plain numbers become 0-d tensors. ``copy it`` is for values that some op writes in
    place.
    """
    keys = [(line, value, clone) for line, asked in wanted.items() for value, clone in asked]
    number = {(line, value): k for k, (line, value, _) in enumerate(keys)}
    seen: dict[tuple[int, int], list[torch.Tensor]] = {(line, value): [] for line, value, _ in keys}

    def note(key: int, value: torch.Tensor) -> None:
        line, which, clone = keys[key]
        kept = seen[line, which]
        if len(kept) < LIMIT:
            kept.append(value.clone() if clone else value.detach())

    def before(line: Line) -> None:
        for value, _ in wanted.get(line.index, ()):
            new = run.copier.known[value]
            as_tensor = new if program.is_tensor(value) else number_to_tensor(run.graph, new)
            run.note(as_tensor, number[line.index, value])

    run = _InstrumentedModule(program)
    run.write(before=before)
    torchscript.remove_dead_code(run.graph)
    run.run(module, sample, note)
    return seen


def number_to_tensor(graph: torch._C.Graph, value: torch._C.Value) -> torch._C.Value:
    """An int, float or bool as a 0-d int64, float64 or bool tensor, at the insertion point."""
    node = graph.create("prim::NumToTensor", [value], 1)
    graph.insertNode(node)
    node.output().setType(TENSOR)
    return node.output()


def _constant(graph: Any, number: int) -> torch._C.Value:
    found: torch._C.Value = graph.insertConstant(number)
    return found


class _InstrumentedModule:
    """A copy of ``program`` that notes values while it runs: written once, run for each sample."""

    def __init__(self, program: Program) -> None:
        self.graph = torch._C.Graph()
        self._program = program
        self._number = next(_runs)
        known: dict[int, Any] = {}
        for value in program.inputs:
            new = self.graph.addInput()
            new.setType(program.values[value].type())
            known[value] = new
        self.copier = Copier(program, self.graph, frozenset(), known)
        self._run = _constant(self.graph, self._number)
        self._function: Any = None

    def write(
        self,
        enter: Callable[[Block], None] = lambda block: None,
        before: Callable[[Line], None] = lambda line: None,
        after: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """Copy all lines, with callbacks at the start of each block and around each line."""

        def fill(block: Block) -> None:
            enter(block)
            for index in block.lines:
                line = self._program.lines[index]
                before(line)
                if line.blocks:
                    self.copier.copy_control(line, fill)
                else:
                    self.copier.copy(line)
                after(line)

        fill(self._program.blocks[0])
        self.graph.registerOutput(self._run)

    def note(self, value: torch._C.Value, key: int) -> None:
        inputs = [value, self._run, _constant(self.graph, key)]
        node = self.graph.create("blade_graph::note", inputs, 0)
        self.graph.insertNode(node)

    def run(self, module: torch.jit.ScriptModule, sample: Sequence[Any], note: Note) -> None:
        """Run it unoptimized, to keep its values as they are. All runs draw the same random numbers."""
        if self._function is None:
            self.graph.lint()
            self._function = torchscript.function_of("observe", self.graph)
        # Deep copies: the graph may write its inputs and the module's buffers.
        this = copy.deepcopy(module) if next(iter(self.graph.inputs())).uses() else module
        _running[self._number] = note
        try:
            with seeded_generators(0), torch.no_grad(), torchscript.unoptimized(), on_free_cpus():
                self._function(this._c, *copy.deepcopy(tuple(sample)))
        finally:
            del _running[self._number]

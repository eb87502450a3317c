# SPDX-License-Identifier: Apache-2.0
"""Real inputs of groups: the values at their boundaries when the captured module runs.

    samples = BoundarySamples(captured, graph_view)
    samples.record([find_boundary(graph_view, group) for group in groups])    # each input runs once
    per_sample, per_probe = samples.of(boundary)

All boundaries of one ``record`` share a run. Recorded values are kept: asking for a part of a group needs
no further run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from blade.core.captured import Captured
from blade.graph.torchscript.boundary import Boundary
from blade.graph.torchscript.observe_values import observe_tensors
from blade.graph.torchscript.view import GraphView

Inputs = tuple[torch.Tensor, ...]
Key = tuple[int, int]  # line, value


class BoundarySamples:
    """Tensors observed at lines of ``view``'s program, per sample and probe of ``captured``."""

    def __init__(self, captured: Captured, view: GraphView) -> None:
        self._captured = captured
        self._view = view
        self._seen: list[dict[Key, list[torch.Tensor]]] = [
            {} for _ in (*captured.samples, *captured.probes)
        ]
        self._known: set[Key] = set()

    def record(self, boundaries: Iterable[Boundary]) -> None:
        """Run every sample and probe once, unless all inputs of these boundaries are known.

        Inputs that the caller passes are known without a run.
        """
        fresh = {key: None for b in boundaries for key in _keys(b) if key not in self._known}
        if not fresh:
            return
        given = [key for key in fresh if self._is_given(*key)]
        wanted: dict[int, list[tuple[int, bool]]] = {}
        for line, value in fresh:
            if (line, value) not in given:
                copies = self._view.aliases.may_be_written(value)
                wanted.setdefault(line, []).append((value, copies))
        program, module = self._view.program, self._captured.module
        runs = (*self._captured.samples, *self._captured.probes)
        for run, seen in zip(runs, self._seen, strict=True):
            if wanted:
                seen.update(observe_tensors(program, module, run, wanted))
            seen.update(self._given(run, given))
        self._known.update(fresh)

    def are_given(self, boundary: Boundary) -> bool:
        """Whether the inputs of the group are tensors that the caller passed: each run has one execution."""
        return all(self._is_given(*key) for key in _keys(boundary))

    def _is_given(self, line: int, value: int) -> bool:
        """Whether ``line``, which runs exactly once, reads an unwritten tensor that the caller passed."""
        program = self._view.program
        return (
            value in program.inputs
            and program.values[value].type().kind() == "TensorType"
            and program.lines[line].block == 0
            and not self._view.aliases.may_be_written(value)
        )

    def _given(self, run: tuple[Any, ...], keys: Sequence[Key]) -> dict[Key, list[torch.Tensor]]:
        """Copies with the same strides, so that no write can reach the caller's tensors."""
        _, *inputs = self._view.program.inputs
        copies = {value: copy.deepcopy(run[inputs.index(value)]) for _, value in keys}
        return {(line, value): [copies[value].detach()] for line, value in keys}

    def of(self, boundary: Boundary) -> tuple[list[Inputs], list[Inputs]]:
        """Inputs of the group at the samples and at the probes.

        A group in a loop runs several times: executions with the sizes seen first count as samples,
        others as probes. If only probes reached a group, its first probe counts as sample.
        """
        samples, probes, _ = self._split(boundary)
        return samples, probes

    def first_run(self, boundary: Boundary) -> int:
        """The position of the first sample that reaches the group, counted on through the probes."""
        self.record([boundary])
        reach = (bool(self._executions(boundary, seen)) for seen in self._seen)
        return next((index for index, does in enumerate(reach) if does), len(self._seen))

    def origins(self, boundary: Boundary) -> list[int]:
        """For each sample of the group, the position of the captured sample it comes from."""
        return self._split(boundary)[2]

    def _split(self, boundary: Boundary) -> tuple[list[Inputs], list[Inputs], list[int]]:
        self.record([boundary])
        count = len(self._captured.samples)
        samples: list[Inputs] = []
        probes: list[Inputs] = []
        origins: list[int] = []
        for index, seen in enumerate(self._seen):
            shapes: set[object] = set()
            for inputs in self._executions(boundary, seen):
                shape = tuple(t.shape for t in inputs)
                first = index < count and shape not in shapes
                (samples if first else probes).append(inputs)
                origins += [index] if first else []
                shapes.add(shape)
        if not samples:
            samples, probes, origins = probes[:1], probes[1:], [0]
        return samples, probes, origins

    def further(self, boundary: Boundary) -> Iterator[Inputs]:
        """Inputs of the group at the calibration samples, one run of the module after the other."""
        keys = _keys(boundary)
        given = [key for key in keys if self._is_given(*key)]
        wanted: dict[int, list[tuple[int, bool]]] = {}
        for line, value in keys:
            if (line, value) not in given:
                copies = self._view.aliases.may_be_written(value)
                wanted.setdefault(line, []).append((value, copies))
        for run in self._captured.calibration:
            seen = self._given(run, given)
            if wanted:
                seen |= observe_tensors(self._view.program, self._captured.module, run, wanted)
            yield from self._executions(boundary, seen)

    def varied(self, boundary: Boundary) -> bool:
        """Whether several runs reached the group."""
        return sum(bool(self._executions(boundary, seen)) for seen in self._seen) > 1

    def _executions(
        self, boundary: Boundary, seen: dict[Key, list[torch.Tensor]]
    ) -> Sequence[Inputs]:
        if not boundary.inputs:
            return [()]
        # All lines of a block run equally often, so the n-th tensors belong together.
        return list(zip(*(seen[key] for key in _keys(boundary)), strict=False))


def _keys(boundary: Boundary) -> list[Key]:
    return list(zip(boundary.read_at, boundary.inputs, strict=True))

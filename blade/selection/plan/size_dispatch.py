# SPDX-License-Identifier: Apache-2.0
"""Size dispatch: a short table from a size of the inputs to an engine, where winners differ by size.

    table = find_size_dispatch(candidates, samples, weights)      # None: no table pays
    table.size.source(), table.bounds, table.serving      # "x0.size(1)", (40,), (disc, onnxruntime)

The border between two measured sizes is their geometric mean; beyond the measured sizes the nearest one
decides. A table has to beat the best one with an entry less by more than the noise of both measurements.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import exp, isqrt, log, sqrt

import torch

from blade.fallback.cluster_module import Dispatch
from blade.report import ORIGINAL, Timing, Verdict
from blade.selection.plan.candidate import Candidate, Weights
from blade.timing.decision import is_faster, why_clearly_slower
from blade.verification.cases import Inputs

MAX_ENTRIES = 3

Speed = tuple[float, float]  # speed, and its noise


@dataclass(frozen=True)
class DispatchAxis:
    """The size that a table reads: an axis of an input, or (``None``) the elements of all inputs."""

    axis: tuple[int, int] | None
    inputs: int

    def of(self, inputs: Inputs) -> int:
        if self.axis is None:
            return sum(t.numel() for t in inputs)
        return int(inputs[self.axis[0]].shape[self.axis[1]])

    def source(self) -> str:
        """A TorchScript expression over parameters x0, x1, ...; 0 for an input of too small a rank, which the
        guard of every engine refuses."""
        if self.axis is None:
            return " + ".join(f"x{i}.numel()" for i in range(self.inputs))
        i, axis = self.axis
        return f"x{i}.size({axis}) if x{i}.dim() > {axis} else 0"

    def __str__(self) -> str:
        return self.source().partition(" if ")[0]


@dataclass(frozen=True)
class SizeDispatch:
    """``serving[i]`` (``None``: the original) takes sizes up to ``bounds[i]``, the last one any size."""

    size: DispatchAxis
    bounds: tuple[int, ...]
    serving: tuple[Candidate | None, ...]
    timings: tuple[Timing, ...]  # the serving engine's, for samples where one serves

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The serving candidates, each once."""
        return tuple({c.backend: c for c in self.serving if c is not None}.values())

    @property
    def backend(self) -> str:
        names = [c.backend if c is not None else ORIGINAL for c in self.serving]
        return "+".join(dict.fromkeys(names))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the candidates."""
        return max((c.verdict for c in self.candidates), key=lambda v: v.error)

    @property
    def engines(self) -> tuple[torch.ScriptObject, ...]:
        return tuple(engine for c in self.candidates for engine in c.engines)

    def dispatch(self) -> Dispatch:
        """The form that ``cluster_module`` takes."""
        engines = tuple(c.engine if c is not None else None for c in self.serving)
        return Dispatch(self.size.source(), self.bounds, engines)

    def __str__(self) -> str:
        """``x0.size(1) <= 40: disc, <= 200: onnxruntime, else torchscript``"""
        names = [c.backend if c is not None else ORIGINAL for c in self.serving]
        parts = [f"<= {b}: {name}" for b, name in zip(self.bounds, names, strict=False)]
        return f"{self.size} {', '.join(parts)}, else {names[-1]}"


@dataclass(frozen=True)
class _DispatchPlan:
    ends: tuple[int, ...]  # number of distinct sizes before each border
    serving: tuple[Candidate | None, ...]
    speed: Speed


def find_size_dispatch(
    candidates: Sequence[Candidate], samples: Sequence[Inputs], weights: Weights = None
) -> SizeDispatch | None:
    """Return the best table of at least two entries, if it pays; all ``candidates`` are timed."""
    timed = [c for c in candidates if len(c.timings) == len(samples)]
    size = _dispatch_axis(samples)
    if not timed or size is None:
        return None
    order = sorted(range(len(samples)), key=lambda i: size.of(samples[i]))
    groups = [list(g) for _, g in groupby(order, key=lambda i: size.of(samples[i]))]
    each = [1.0] * len(samples) if weights is None else list(weights)
    best = _best_dispatch(timed, groups, each, 1)
    for entries in range(2, min(MAX_ENTRIES, len(groups)) + 1):
        plan = _best_dispatch(timed, groups, each, entries)
        if is_faster(plan.speed, best.speed):
            best = plan
    if not best.ends:
        return None
    sizes = [size.of(samples[g[0]]) for g in groups]
    bounds = tuple(isqrt(sizes[end - 1] * sizes[end]) for end in best.ends)
    serves = [best.serving[bisect_left(bounds, size.of(one))] for one in samples]
    timings = tuple(c.timings[i] for i, c in enumerate(serves) if c is not None)
    return SizeDispatch(size, bounds, best.serving, timings)


def _dispatch_axis(samples: Sequence[Inputs]) -> DispatchAxis | None:
    """Return the axis to dispatch on; ``None`` if all samples have the same sizes."""
    if len({len(one) for one in samples}) != 1 or not samples[0]:
        return None
    shapes = [[tuple(t.shape) for t in one] for one in samples]
    if len({tuple(map(len, one)) for one in shapes}) != 1:
        return DispatchAxis(None, len(samples[0]))
    moving = {
        tuple(one[i][axis] for one in shapes): (i, axis)
        for i in reversed(range(len(shapes[0])))
        for axis in reversed(range(len(shapes[0][i])))
    }
    moving = {sizes: where for sizes, where in moving.items() if len(set(sizes)) > 1}
    if not moving:
        return None
    return DispatchAxis(next(iter(moving.values())) if len(moving) == 1 else None, len(samples[0]))


def _best_dispatch(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[int]],
    weights: Sequence[float],
    entries: int,
) -> _DispatchPlan:
    """Best way to split ``groups`` (samples of equal size, ascending) into this many entries."""
    plans = []
    for ends in combinations(range(1, len(groups)), entries - 1):
        parts = [
            [i for group in groups[a:b] for i in group]
            for a, b in zip((0, *ends), (*ends, len(groups)), strict=True)
        ]
        serving = tuple(_best_at(candidates, part, weights) for part in parts)
        plans.append(_DispatchPlan(ends, serving, _speed(serving, parts, weights)))
    return max(plans, key=lambda plan: plan.speed[0])


def _best_at(
    candidates: Sequence[Candidate], part: Sequence[int], weights: Sequence[float]
) -> Candidate | None:
    """The fastest candidate at the samples in ``part`` that loses clearly at none of them."""
    rank: list[tuple[float, Candidate | None]] = [(0.0, None)]
    for one in candidates:
        timings = [one.timings[i] for i in part]
        if why_clearly_slower(timings) is None:
            gain = sum(weights[i] * log(one.timings[i].speedup) for i in part)
            rank.append((gain, one))
    return max(rank, key=lambda r: r[0])[1]


def _speed(
    serving: Sequence[Candidate | None], parts: Sequence[Sequence[int]], weights: Sequence[float]
) -> Speed:
    pairs = [
        (weights[i], one.timings[i])
        for one, part in zip(serving, parts, strict=True)
        if one is not None
        for i in part
    ]
    total = sum(weights)
    mean = exp(sum(w * log(t.speedup) for w, t in pairs) / total)
    return mean, sqrt(sum((w * t.spread) ** 2 for w, t in pairs)) / total

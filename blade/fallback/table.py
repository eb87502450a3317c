# SPDX-License-Identifier: Apache-2.0
"""Different winners at different sizes: a short table, from a size of the inputs to an engine.

    table = find_table(candidates, samples, weights)      # None: one engine, or none, is as good everywhere
    table.size.source(), table.bounds, table.serving      # "x0.size(1)", (40,), (disc, onnxruntime)

Between two measured sizes the border is their geometric mean; beyond the measured ones the nearest rules.
A table has to beat what serves with one entry less by more than the noise of measuring both.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import exp, isqrt, log, sqrt

import torch

from blade.fallback.candidate import Candidate, Weights
from blade.fallback.cases import Inputs
from blade.fallback.cluster_module import Dispatch
from blade.fallback.measure import is_faster, why_clearly_slower
from blade.report import ORIGINAL, Timing, Verdict

MOST = 3  # entries

Speed = tuple[float, float]  # and its noise


@dataclass(frozen=True)
class Size:
    """What a table looks at: one axis of one input, or (``None``) the elements of all inputs together."""

    axis: tuple[int, int] | None
    inputs: int

    def of(self, inputs: Inputs) -> int:
        if self.axis is None:
            return sum(t.numel() for t in inputs)
        return int(inputs[self.axis[0]].shape[self.axis[1]])

    def source(self) -> str:
        """As TorchScript, over parameters x0, x1, ...; 0 for an input of too small a rank, which no
        engine takes anyway."""
        if self.axis is None:
            return " + ".join(f"x{i}.numel()" for i in range(self.inputs))
        i, axis = self.axis
        return f"x{i}.size({axis}) if x{i}.dim() > {axis} else 0"

    def __str__(self) -> str:
        return self.source().partition(" if ")[0]


@dataclass(frozen=True)
class Table:
    """``serving[i]`` (``None``: the original) takes sizes up to ``bounds[i]``, the last one all larger ones."""

    size: Size
    bounds: tuple[int, ...]
    serving: tuple[Candidate | None, ...]
    timings: tuple[
        Timing, ...
    ]  # of the one that serves there, at those samples where that is an engine

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that serve, each once."""
        return tuple({c.backend: c for c in self.serving if c is not None}.values())

    @property
    def backend(self) -> str:
        names = [c.backend if c is not None else ORIGINAL for c in self.serving]
        return "+".join(dict.fromkeys(names))

    @property
    def verdict(self) -> Verdict:
        """The worst of theirs."""
        return max((c.verdict for c in self.candidates), key=lambda v: v.error)

    @property
    def engines(self) -> tuple[torch.ScriptObject, ...]:
        return tuple(engine for c in self.candidates for engine in c.engines)

    def dispatch(self) -> Dispatch:
        """For ``cluster_module``."""
        engines = tuple(c.engine if c is not None else None for c in self.serving)
        return Dispatch(self.size.source(), self.bounds, engines)

    def __str__(self) -> str:
        """``x0.size(1) <= 40: disc, <= 200: onnxruntime, else torchscript``"""
        names = [c.backend if c is not None else ORIGINAL for c in self.serving]
        parts = [f"<= {b}: {name}" for b, name in zip(self.bounds, names, strict=False)]
        return f"{self.size} {', '.join(parts)}, else {names[-1]}"


@dataclass(frozen=True)
class _Plan:
    ends: tuple[int, ...]  # number of distinct sizes before each border
    serving: tuple[Candidate | None, ...]
    speed: Speed


def find_table(
    candidates: Sequence[Candidate], samples: Sequence[Inputs], weights: Weights = None
) -> Table | None:
    """The best table of at least two entries, if it pays; ``candidates`` were timed at all ``samples``."""
    timed = [c for c in candidates if len(c.timings) == len(samples)]
    size = _deciding_size(samples)
    if not timed or size is None:
        return None
    order = sorted(range(len(samples)), key=lambda i: size.of(samples[i]))
    groups = [list(g) for _, g in groupby(order, key=lambda i: size.of(samples[i]))]
    each = [1.0] * len(samples) if weights is None else list(weights)
    best = _best_plan(timed, groups, each, 1)
    for entries in range(2, min(MOST, len(groups)) + 1):
        plan = _best_plan(timed, groups, each, entries)
        if is_faster(plan.speed, best.speed):
            best = plan
    if not best.ends:
        return None
    sizes = [size.of(samples[g[0]]) for g in groups]
    bounds = tuple(isqrt(sizes[end - 1] * sizes[end]) for end in best.ends)
    serves = [best.serving[bisect_left(bounds, size.of(one))] for one in samples]
    timings = tuple(c.timings[i] for i, c in enumerate(serves) if c is not None)
    return Table(size, bounds, best.serving, timings)


def _deciding_size(samples: Sequence[Inputs]) -> Size | None:
    """``None`` if all samples have the same sizes."""
    if len({len(one) for one in samples}) != 1 or not samples[0]:
        return None
    shapes = [[tuple(t.shape) for t in one] for one in samples]
    if len({tuple(map(len, one)) for one in shapes}) != 1:
        return Size(None, len(samples[0]))
    moving = {
        tuple(one[i][axis] for one in shapes): (i, axis)
        for i in reversed(range(len(shapes[0])))
        for axis in reversed(range(len(shapes[0][i])))
    }
    moving = {sizes: where for sizes, where in moving.items() if len(set(sizes)) > 1}
    if not moving:
        return None
    return Size(next(iter(moving.values())) if len(moving) == 1 else None, len(samples[0]))


def _best_plan(
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[int]],
    weights: Sequence[float],
    entries: int,
) -> _Plan:
    """Of all ways to cut ``groups`` (samples of equal size, ascending) into so many entries."""
    plans = []
    for ends in combinations(range(1, len(groups)), entries - 1):
        parts = [
            [i for group in groups[a:b] for i in group]
            for a, b in zip((0, *ends), (*ends, len(groups)), strict=True)
        ]
        serving = tuple(_best_at(candidates, part, weights) for part in parts)
        plans.append(_Plan(ends, serving, _speed(serving, parts, weights)))
    return max(plans, key=lambda plan: plan.speed[0])


def _best_at(
    candidates: Sequence[Candidate], part: Sequence[int], weights: Sequence[float]
) -> Candidate | None:
    """Who is fastest at the samples in ``part`` and loses clearly at none of them."""
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

# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles of a cluster: the sizes its engine serves, and the sizes it is tuned for.

    wide, seen = find_profiles(cluster, config)      # to try in this order
    wide.shapes[0].opt                               # ((8, 128), (8, 128)): one shape per input
    wide.ranges                                      # {(0, 1): (1, 512)}: the ranges that guards check

All profiles of an engine cover the same range and differ in the sizes they are optimized for: one per shape
of ``dynamic_tuning_shapes["opts"]``, else one per distinct sample. So a size is inside all profiles or none,
and the guard is one comparison per dimension.

The user declares sizes of the model's inputs; a cluster inside sees other sizes. Capture has run the model at
the ends of the declared ranges, so the smallest and largest sizes that reached the cluster are its range.
Without a declaration the range is from 1 to twice the largest size seen (as a power of 2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

import sympy
import torch

from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.guards import relied_on

Shape = tuple[int, ...]
Sizes = Mapping[sympy.Symbol, int]

DERIVED = 4  # most profiles made from samples: each takes time to build and memory to run


@dataclass(frozen=True)
class Profile:
    """Smallest, optimal and largest shapes, each with one shape per input of the cluster."""

    min: tuple[Shape, ...]
    opt: tuple[Shape, ...]
    max: tuple[Shape, ...]


@dataclass(frozen=True)
class Profiles:
    """``ranges``: (input, axis) -> (low, high), both included, for every axis whose size may vary."""

    shapes: tuple[Profile, ...]
    ranges: Mapping[tuple[int, int], tuple[int, int]]


def find_profiles(cluster: Cluster, config: Config) -> tuple[Profiles, ...]:
    """The profiles to build for, best first; a narrower alternative follows if the first is not declared.

    Raises ``Refused`` for a cluster without samples, because there is nothing to tune for.
    """
    symbols = _Symbols(cluster)
    runs = [symbols.read(one) for one in (*cluster.samples, *cluster.probes)]
    if not runs:
        raise Refused(
            Code.CONVERSION_FAILED, "There is no sample to take optimization profiles from."
        )
    opts = _opts(symbols, cluster, config)
    low, high = _hull(runs)
    wanted: list[tuple[Sizes, Sizes]]
    declared = config.dynamic_shapes is not None or config.dynamic_tuning_shapes is not None
    if declared:
        # A lower end of 1 is run at 2, because torch specializes on size 1.
        from_one = {s: 1 if n == 2 and _reaches_one(config) else n for s, n in low.items()}
        wanted = [(from_one, high), (low, high)]
    else:
        varied = {s for s in low if low[s] < high[s]} or set(
            low
        )  # the others are fixed by the model
        wide_low = {s: 1 if s in varied else n for s, n in low.items()}
        wide_high = {s: _roomy(n) if s in varied else n for s, n in high.items()}
        wanted = [(wide_low, wide_high), (low, high)]
    wanted.append((opts[0], opts[0]))
    found = dict.fromkeys(one for low, high in wanted if (one := symbols.profiles(low, opts, high)))
    return tuple(found)


def nearest(profiles: Sequence[Profile], shapes: Sequence[Shape]) -> int:
    """The profile tuned closest to ``shapes``, by the ratios of sizes."""

    def distance(profile: Profile) -> float:
        return sum(
            abs(log(max(a, 1) / max(b, 1)))
            for own, given in zip(profile.opt, shapes, strict=True)
            for a, b in zip(own, given, strict=True)
        )

    return min(range(len(profiles)), key=lambda i: distance(profiles[i]))


class _Symbols:
    """The free sizes of a cluster's inputs."""

    def __init__(self, cluster: Cluster) -> None:
        fakes = [n.meta["val"] for n in cluster.gm.graph.nodes if n.op == "placeholder"]
        simplify = cluster.shape_env.simplify
        self.dims = [[simplify(_expression(size)) for size in fake.shape] for fake in fakes]
        self.relations = [relation for relation, _ in relied_on(cluster.gm, cluster.shape_env)]
        free = {s for dims in self.dims for d in dims for s in d.free_symbols}
        self.bounds = {s: cluster.shape_env.var_to_range[s] for s in sorted(free, key=str)}

    def read(self, inputs: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
        """The sizes at real inputs."""
        found: dict[sympy.Symbol, int] = {}
        for dims, tensor in zip(self.dims, inputs, strict=True):
            for dim, size in zip(dims, tensor.shape, strict=True):
                if dim.is_Symbol:
                    found[dim] = size
        assert set(found) == set(self.bounds), (self.dims, found)
        return found

    def shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return tuple(tuple(int(dim.xreplace(_whole(sizes))) for dim in dims) for dims in self.dims)

    def hold(self, sizes: Sizes) -> bool:
        """Whether the cluster's guards hold at ``sizes``."""
        inside = all(
            bool(bound.lower <= sizes[s]) and bool(sizes[s] <= bound.upper)
            for s, bound in self.bounds.items()
        )
        whole = _whole(sizes)
        return inside and all(r.xreplace(whole) != sympy.false for r in self.relations)

    def profiles(self, low: Sizes, opts: Sequence[Sizes], high: Sizes) -> "Profiles | None":
        """The profiles; ``None`` if the guards exclude the sizes ``low`` or ``high``."""
        inside = [o for o in opts if all(low[s] <= o[s] <= high[s] for s in self.bounds)]
        if not inside or not self.hold(low) or not self.hold(high):
            return None
        ends = self.shapes(low), self.shapes(high)
        made = (Profile(ends[0], self.shapes(opt), ends[1]) for opt in inside)
        return Profiles(tuple(dict.fromkeys(made)), _Ranges(self._ranges(*ends)))

    def _ranges(
        self, low: Sequence[Shape], high: Sequence[Shape]
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for i, dims in enumerate(self.dims):
            for axis, dim in enumerate(dims):
                if dim.free_symbols:
                    yield (i, axis), (low[i][axis], high[i][axis])


class _Ranges(dict[tuple[int, int], tuple[int, int]]):
    """Hashable, as ``Profiles`` are compared."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def _opts(symbols: _Symbols, cluster: Cluster, config: Config) -> list[Sizes]:
    """The sizes to tune for: the user's tuning shapes as they reach the cluster, else its samples'."""
    tuning = config.dynamic_tuning_shapes
    if tuning is not None and tuning.opts:
        # Capture appends them to the samples in this order, each once.
        every = list(dict.fromkeys((tuning.min, *tuning.opts, tuning.max)))
        if len(cluster.samples) > len(every):
            at = dict(zip(every, cluster.samples[-len(every) :]))
            return _distinct([symbols.read(at[opt]) for opt in tuning.opts])
    return _distinct([symbols.read(one) for one in cluster.samples or cluster.probes])[:DERIVED]


def _distinct(every: Sequence[Sizes]) -> list[Sizes]:
    return list({tuple(sorted((str(s), n) for s, n in one.items())): one for one in every}.values())


def _hull(runs: Sequence[Sizes]) -> tuple[dict[sympy.Symbol, int], dict[sympy.Symbol, int]]:
    low = {s: max(1, min(run[s] for run in runs)) for s in runs[0]}
    return low, {s: max(low[s], *(run[s] for run in runs)) for s in runs[0]}


def _reaches_one(config: Config) -> bool:
    """Whether any declared range starts at 1 (or at 0, which engines do not serve)."""
    dims = [d for axes in (config.dynamic_shapes or {}).values() for d in axes.values()]
    return any(isinstance(d, tuple) and d[0] <= 1 for d in dims)


def _roomy(size: int) -> int:
    return 1 << (2 * max(size, 1) - 1).bit_length()


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _whole(sizes: Sizes) -> dict[sympy.Symbol, sympy.Integer]:
    return {s: sympy.Integer(n) for s, n in sizes.items()}

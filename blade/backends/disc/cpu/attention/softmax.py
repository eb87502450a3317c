# SPDX-License-Identifier: Apache-2.0
"""Attention's softmax over a block of scores ``p[key][query]``. Queries are in lanes: no sums across lanes.

Across blocks of keys each query keeps a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.attention.tiles import StridedRows, clamped_rows, transpose_rows
from blade.backends.disc.cpu.emit import elementary as math
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.target.cpu import CpuTarget

_INFINITY = float("inf")


def add_key_bias(target: CpuTarget, vectors: int) -> MlirFunction:
    """``p[s][query] += bias[s]``, for padding masks, which all queries share."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_key_bias_{vectors}",
        "p:ptr keys:i64 bias:ptr distance:i64 fill:f32",
        lanes,
    )
    with f.loop(f.number(0), f["keys"], 1) as s:
        bias = f.broadcast(f.load(f.at(f["bias"], f.mul(s, f["distance"]))), lanes)
        row = f.at(f["p"], f.mul(s, f.number(width)))
        for v in range(vectors):
            at = f.at(row, v * lanes)
            f.store(biased(f, f.load(at, lanes), bias), at)
    return f


def biased(f: MlirFunction, x: SsaValue, bias: SsaValue) -> SsaValue:
    """The score plus the bias; the bias alone if it is ``fill``."""
    fill = f.broadcast(f["fill"], x.lanes)
    return f.select(f.compare("oeq", bias, fill), bias, f.add(x, bias))


def cap_scores(target: CpuTarget, vectors: int) -> MlirFunction:
    """``p = cap * tanh(p / cap)``"""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(f"attention_f32_cap_{vectors}", "p:ptr keys:i64 cap:f32", lanes)
    with f.loop(f.number(0), f.mul(f["keys"], f.number(width)), lanes) as at:
        f.store(capped(f, f.load(f.at(f["p"], at), lanes)), f.at(f["p"], at))
    return f


def capped(f: MlirFunction, x: SsaValue) -> SsaValue:
    """A vector of scores within (-cap, cap)."""
    cap = f.broadcast(f["cap"], x.lanes)
    return f.mul(math.tanh(f, f.div(x, cap)), cap)


def add_bias(target: CpuTarget, vectors: int) -> MlirFunction:
    """``p[s][query] += bias[query, s]`` for ``count`` queries; registers transpose squares of the bias."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_bias_{vectors}",
        "p:ptr keys:i64 bias:ptr count:i64 query_distance:i64 distance:i64 fill:f32",
        lanes,
    )
    pointers = clamped_rows(f, f["bias"], f["query_distance"], f["count"], width)
    adjacent = f.compare("eq", f["distance"], f.number(1))
    whole = f.select(adjacent, f.floor_to(f["keys"], lanes), f.number(0))
    transpose_rows(
        f,
        StridedRows(pointers, f["distance"], whole, f["keys"]),
        f["p"],
        lambda column, to: f.store(biased(f, f.load(to, lanes), column), to),
    )
    return f


def mask_future(target: CpuTarget, vectors: int) -> MlirFunction:
    """Causal mask: query i of the block sees the block's keys up to ``first + i``; the others become -inf."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(f"attention_f32_causal_{vectors}", "p:ptr keys:i64 first:i64", lanes)
    never = f.constant(-_INFINITY, "f32", lanes)
    # a negative `first` puts the block's first keys in the future of its first queries
    start = f.most(f["first"], f.number(0))
    with f.loop(start, f["keys"], 1) as s:
        ahead = f.op(f"arith.trunci {f.sub(s, f['first']).name} : i64 to i32", "i32", 1)
        ahead = f.broadcast(ahead, lanes)
        row = f.at(f["p"], f.mul(s, f.number(width)))
        for v in range(vectors):
            query = f.add(f.iota("i32", lanes), f.constant(v * lanes, "i32", lanes))
            at = f.at(row, v * lanes)
            seen = f.compare("sge", query, ahead)
            f.store(f.select(seen, f.load(at, lanes), never), at)
    return f


def exponentials(target: CpuTarget, vectors: int) -> MlirFunction:
    """``p = exp(p - maximum)`` with running ``maxima`` and ``totals``; ``factors`` rescale earlier sums."""
    lanes = target.lanes
    f = MlirFunction(
        f"attention_f32_softmax_{vectors}",
        "p:ptr keys:i64 maxima:ptr totals:ptr factors:ptr",
        lanes,
    )
    now = running_maxima(f, vectors)
    renew(f, now, _sums(f, vectors, now.shift))
    return f


@dataclass(frozen=True)
class RunningMaxima:
    """Per vector of queries, the maximum before this block of keys and after it, and what is subtracted."""

    old: list[SsaValue]
    top: list[SsaValue]
    shift: list[SsaValue]


def running_maxima(f: MlirFunction, vectors: int) -> RunningMaxima:
    """Emit the maxima of the scores ``p`` and of those before."""
    lanes = f.lanes
    old = [f.load(f.at(f["maxima"], v * lanes), lanes) for v in range(vectors)]
    top = _maxima(f, vectors, old)
    never = f.constant(-_INFINITY, "f32", lanes)
    zeros = f.constant(0.0, "f32", lanes)
    return RunningMaxima(old, top, [f.select(f.compare("oeq", t, never), zeros, t) for t in top])


def renew(
    f: MlirFunction, now: RunningMaxima, sums: list[SsaValue], scale: SsaValue | None = None
) -> None:
    """Store the maxima, factors for what was summed before, and the totals with this block's ``sums``.

    ``scale``: what scores, and so their maxima, are still to be multiplied by.
    """
    lanes = f.lanes
    for v, total in enumerate(sums):
        apart = f.sub(now.old[v], now.shift[v])
        factor = exp_below_zero(f, apart if scale is None else f.mul(apart, scale))
        at = f.at(f["totals"], v * lanes)
        f.store(f.fma(f.load(at, lanes), factor, total), at)
        f.store(now.top[v], f.at(f["maxima"], v * lanes))
        f.store(factor, f.at(f["factors"], v * lanes))


def _maxima(f: MlirFunction, vectors: int, start: list[SsaValue]) -> list[SsaValue]:
    lanes, width = f.lanes, vectors * f.lanes
    whole = f.floor_to(f["keys"], 4)
    top = start
    for low, high, unroll in ((f.number(0), whole, 4), (whole, f["keys"], 1)):
        with f.carrying(low, high, unroll, top) as carry:
            row = f.at(f["p"], f.mul(carry.index, f.number(width)))
            new = []
            for v in range(vectors):
                parts = [f.load(f.at(row, u * width + v * lanes), lanes) for u in range(unroll)]
                new.append(_larger(f, _largest(f, parts), carry.values[v]))
            carry.next(new)
        top = carry.results
    return top


def _largest(f: MlirFunction, parts: list[SsaValue]) -> SsaValue:
    while len(parts) > 1:
        parts = [
            _larger(f, *parts[k : k + 2]) if k + 1 < len(parts) else parts[k]
            for k in range(0, len(parts), 2)
        ]
    return parts[0]


def _larger(f: MlirFunction, a: SsaValue, b: SsaValue) -> SsaValue:
    """The maximum in one instruction. It may drop a NaN, which returns with its exponential."""
    return f.select(f.compare("ogt", a, b), a, b)


def _sums(f: MlirFunction, vectors: int, shift: list[SsaValue]) -> list[SsaValue]:
    lanes, width = f.lanes, vectors * f.lanes
    whole = f.floor_to(f["keys"], 4)
    sums = [f.constant(0.0, "f32", lanes)] * vectors
    for low, high, unroll in ((f.number(0), whole, 4), (whole, f["keys"], 1)):
        with f.carrying(low, high, unroll, sums) as carry:
            row = f.at(f["p"], f.mul(carry.index, f.number(width)))
            new = []
            for v in range(vectors):
                parts = []
                for u in range(unroll):
                    at = f.at(row, u * width + v * lanes)
                    y = exp_below_zero(f, f.sub(f.load(at, lanes), shift[v]))
                    f.store(y, at)
                    parts.append(y)
                while len(parts) > 1:
                    parts = [f.add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                new.append(f.add(carry.values[v], parts[0]))
            carry.next(new)
        sums = carry.results
    return sums


def exp_below_zero(f: MlirFunction, x: SsaValue) -> SsaValue:
    """exp(x) for x <= 0 or NaN. Results below 2**-126 become 0: the maximum contributes 1 to the same sum."""
    x = math.at_least(f, x, math.EXP_TO_ZERO)
    return math.exp_in_one_step(f, x)


def rescale(target: CpuTarget) -> MlirFunction:
    """``sums[query] *= factors[query]`` over ``columns``, a multiple of the lanes."""
    lanes = target.lanes
    f = MlirFunction("attention_f32_rescale", "sums:ptr count:i64 columns:i64 factors:ptr", lanes)
    with f.loop(f.number(0), f["count"], 1) as r:
        factor = f.broadcast(f.load(f.at(f["factors"], r)), lanes)
        row = f.at(f["sums"], f.mul(r, f["columns"]))
        with f.loop(f.number(0), f["columns"], lanes) as e:
            at = f.at(row, e)
            f.store(f.mul(f.load(at, lanes), factor), at)
    return f

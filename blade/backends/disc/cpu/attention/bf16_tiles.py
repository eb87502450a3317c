# SPDX-License-Identifier: Apache-2.0
"""Attention's two matrix products on pairs of bfloat16, summed in float32.

    scores    P[s][query] = scale * sum_d K[s, d] * Q[d][query]     pairs along d: a key's pair is broadcast
    values    O[query, e] = sum_s W[s][query] * V[s, e]             pairs along s: a pair of weights is broadcast

Pairs of queries lie transposed in scratch. Weights, which the softmax makes in float32, are rounded in place; rows of
V are interleaved in scratch, ``pairs[s / 2][e][s % 2]``.
"""

import torch

from blade.backends.disc.cpu.attention.decode import across
from blade.backends.disc.cpu.attention.softmax import biased
from blade.backends.disc.cpu.attention.tiles import clamped_rows, transposed
from blade.backends.disc.cpu.emit.bf16_dot import (
    PAIR,
    Bf16Dot,
    adjacent_pairs,
    bf16_dot,
    paired,
)
from blade.backends.disc.cpu.emit.element_types import decode
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget


def routine(name: str, arguments: str, target: CpuTarget) -> MlirRoutine:
    """An empty function with ``name:type`` arguments."""
    pairs = [(n, kind) for n, kind in (word.split(":") for word in arguments.split())]
    return MlirRoutine(f"attention_bf16_{name}", pairs, target.lanes)


def load_queries(target: CpuTarget, vectors: int) -> MlirRoutine:
    """``blocks[d / 2][query]``: pairs of ``q[query]``; lanes from ``count`` on repeat the last query."""
    lanes, width = target.lanes, vectors * target.lanes
    f = routine(f"queries_{vectors}", "q:ptr distance:i64 count:i64 depth:i64 blocks:ptr", target)
    rows = clamped_rows(f, f["q"], f["distance"], f["count"], width, "i16")
    whole = f.over(f["depth"], PAIR)
    squares = f.floor_to(whole, lanes)
    for first in range(0, width, lanes):
        some = rows[first : first + lanes]
        with f.range(0, squares, lanes) as i:
            at = f.product(i, PAIR)
            columns = transposed(f, [adjacent_pairs(f, f.at(p, at, "i16"), lanes) for p in some])
            to = f.at(f["blocks"], f.sum(f.product(i, width), first))
            for k, column in enumerate(columns):
                f.put(column, to, k * width)
        with f.range(squares, f.above(f["depth"], PAIR)) as i:
            column = f.from_lanes([_pair(f, p, i) for p in some])
            f.put(column, f["blocks"], f.sum(f.product(i, width), first))
    return f


def _pair(f: MlirRoutine, row: SsaValue, pair: SsaValue) -> SsaValue:
    """Two elements of a row as a word; one beyond ``depth`` is zero."""
    first = f.product(pair, PAIR)
    second = f.sum(first, 1)
    exists = f.test("slt", second, f["depth"])
    high = f.get(row, f.pick(exists, second, first), "i16")
    return paired(f, f.get(row, first, "i16"), f.select(exists, high, f.constant(0, "i16")))


def score_tile(target: CpuTarget, vectors: int, rows: int) -> MlirRoutine:
    """``p[s][query]`` for ``rows`` keys; keys from ``count`` on repeat the last key's scores."""
    lanes, width, dot = target.lanes, vectors * target.lanes, bf16_dot(target)
    f = routine(
        f"scores_{rows}x{vectors}",
        "blocks:ptr k:ptr distance:i64 count:i64 depth:i64 scale:f32 p:ptr",
        target,
    )
    keys = clamped_rows(f, f["k"], f["distance"], f["count"], rows, "i16")
    whole = f.over(f["depth"], PAIR)
    even, sums = f.floor_to(whole, 2), [dot.nothing(f)] * (rows * vectors)
    bounds = ((f.whole(0), even, 2), (even, whole, 1), (whole, f.above(f["depth"], PAIR), 1))
    for number, (low, high, unroll) in enumerate(bounds):
        with f.carrying(low, high, unroll, sums) as carry:
            values = list(carry.values)
            for u in range(unroll):
                at = f.sum(carry.index, u)
                block = f.at(f["blocks"], f.product(at, width))
                q = [dot.widened(f, f.get(block, v * lanes, "i32", lanes)) for v in range(vectors)]
                for r, key in enumerate(keys):
                    word = _pair(f, key, at) if number == 2 else _word(f, key, at)
                    k = dot.spread(f, word)
                    for v in range(vectors):
                        values[r * vectors + v] = dot.add(f, values[r * vectors + v], k, q[v])
            carry.next(values)
        sums = carry.results
    scale = f.broadcast(f["scale"], lanes)
    for cell, total in enumerate(sums):
        r, v = divmod(cell, vectors)
        f.put(f.mul(total, scale), f["p"], r * width + v * lanes)
    return f


def _word(f: MlirRoutine, row: SsaValue, pair: SsaValue) -> SsaValue:
    at = f.at(row, f.product(pair, PAIR), "i16")
    return f.op(f"llvm.load {at.name} {{alignment = 2 : i64}} : !llvm.ptr -> i32", "i32", 1)


def narrow_weights(target: CpuTarget, vectors: int) -> MlirRoutine:
    """Round ``p[s][query]`` to pairs along s, in place; the last of an odd number has a zero beside it."""
    lanes, width, dot = target.lanes, vectors * target.lanes, bf16_dot(target)
    f = routine(f"weights_{vectors}", "p:ptr keys:i64", target)
    with f.range(0, f.above(f["keys"], PAIR)) as pair:
        first = f.product(pair, PAIR)
        exists = f.test("slt", f.sum(first, 1), f["keys"])
        for v in range(vectors):
            low, high = (
                dot.narrowed(
                    f,
                    f.get(f["p"], f.sum(f.product(f.sum(first, r), width), v * lanes), lanes=lanes),
                )
                for r in range(PAIR)
            )
            mask = f.broadcast(exists, lanes)
            high = f.select(mask, high, f.like(0, high))
            f.put(paired(f, low, high), f["p"], f.sum(f.product(pair, width), v * lanes))
    return f


def pair_values(target: CpuTarget) -> MlirRoutine:
    """``to[s / 2][e][s % 2] = v[s, e]``, zero beyond ``rows`` and ``columns``; rows are whole vectors."""
    lanes = target.lanes
    f = routine("pairs", "v:ptr distance:i64 rows:i64 columns:i64 padded:i64 to:ptr", target)
    last = f.minus(f["rows"], 1)
    with f.range(0, f.above(f["rows"], PAIR)) as pair:
        first = f.product(pair, PAIR)
        second = f.sum(first, 1)
        exists = f.test("slt", second, f["rows"])
        rows = [
            f.at(f["v"], f.product(s, f["distance"]), "i16") for s in (first, f.least(second, last))
        ]
        with f.range(0, f["columns"], lanes) as e:
            mask = f.first_lanes(f.minus(f["columns"], e))
            low = f.load_masked(f.at(rows[0], e, "i16"), mask, "i16")
            both = f.both(mask, f.broadcast(exists, lanes))
            high = f.load_masked(f.at(rows[1], e, "i16"), both, "i16")
            f.put(paired(f, low, high), f["to"], f.sum(f.product(pair, f["padded"]), e))
    return f


VALUES = "p:ptr width:i64 v:ptr padded:i64 keys:i64 fresh:i1 sums:ptr"


def value_tile(target: CpuTarget, rows: int, vectors: int) -> MlirRoutine:
    """``sums[query, e] += sum_s w[s][query] * v[s, e]``; ``fresh``: take ``sums`` as zeros before."""
    lanes, dot = target.lanes, bf16_dot(target)
    f = routine(f"values_{rows}x{vectors}", VALUES, target)
    totals = [dot.nothing(f)] * (rows * vectors)
    with f.carrying(f.whole(0), f.above(f["keys"], PAIR), 1, totals) as carry:
        totals = list(carry.values)
        row = f.at(f["v"], f.product(carry.index, f["padded"]))
        values = [dot.widened(f, f.get(row, v * lanes, "i32", lanes)) for v in range(vectors)]
        start = f.at(f["p"], f.product(carry.index, f["width"]))
        for r in range(rows):
            weight = dot.spread(f, f.get(start, r, "i32"))
            for v in range(vectors):
                totals[r * vectors + v] = dot.add(f, totals[r * vectors + v], weight, values[v])
        carry.next(totals)
    for cell, total in enumerate(carry.results):
        r, v = divmod(cell, vectors)
        at = f.at(f["sums"], f.sum(f.product(f["padded"], r), v * lanes))
        old = f.select(f["fresh"], dot.nothing(f), f.load(at, lanes))
        f.store(f.add(total, old), at)
    return f


def finish(target: CpuTarget, result: str) -> MlirRoutine:
    """``to[query, e] = sums[query, e] * factors[query]``, rounded if ``result`` is ``i16``."""
    lanes, dot = target.lanes, bf16_dot(target)
    f = routine(
        f"finish_{result}",
        "sums:ptr padded:i64 factors:ptr to:ptr distance:i64 rows:i64 columns:i64",
        target,
    )
    with f.range(0, f["rows"]) as r:
        factor = f.broadcast(f.get(f["factors"], r), lanes)
        sums = f.at(f["sums"], f.product(r, f["padded"]))
        to = f.at(f["to"], f.product(r, f["distance"]), result)
        with f.range(0, f["columns"], lanes) as e:
            mask = f.first_lanes(f.minus(f["columns"], e))
            y = f.mul(f.get(sums, e, lanes=lanes), factor)
            f.store_masked(_as_result(f, dot, y, result), f.at(to, e, result), mask)
    return f


def _as_result(f: MlirRoutine, dot: Bf16Dot, y: SsaValue, result: str) -> SsaValue:
    return y if result == "f32" else dot.narrowed(f, y)


# --- few queries: keys and values are read once, and widened ---

_KEYS = 4  # dot products computed together
_VECTORS = 4  # of columns computed together


def dots(target: CpuTarget) -> MlirRoutine:
    """``p[s] = scale * dot(q, k[s]) + bias[s]`` for every key, or the bias alone (softmax.biased)."""
    f = routine(
        "dots",
        "q:ptr scale:f32 k:ptr distance:i64 keys:i64 depth:i64 bias:ptr bias_distance:i64 "
        "fill:f32 p:ptr",
        target,
    )
    whole = f.floor_to(f["keys"], _KEYS)
    for low, high, count in ((f.whole(0), whole, _KEYS), (whole, f["keys"], 1)):
        with f.range(low, high, count) as s:
            keys = [
                f.at(f["k"], f.product(f.sum(s, r), f["distance"]), "i16") for r in range(count)
            ]
            zeros = [f.constant(0.0, "f32", f.lanes)] * count
            with f.carrying(f.whole(0), f["depth"], f.lanes, zeros) as carry:
                mask = f.first_lanes(f.minus(f["depth"], carry.index))
                q, *rows = (_widened(f, x, carry.index, mask) for x in (f["q"], *keys))
                carry.next([f.fma(q, k, t) for k, t in zip(rows, carry.values, strict=True)])
            for r, total in enumerate(carry.results):
                at = f.sum(s, r)
                bias = f.get(f["bias"], f.product(at, f["bias_distance"]))
                score = f.mul(across(f, "add", total), f["scale"])
                f.put(biased(f, score, bias), f["p"], at)
    return f


def row_of_values(target: CpuTarget, result: str) -> MlirRoutine:
    """``to[e] = factor * sum_s p[s] * v[s, e]``"""
    lanes, dot = target.lanes, bf16_dot(target)
    f = routine(
        f"row_{result}", "p:ptr v:ptr distance:i64 keys:i64 factor:ptr to:ptr columns:i64", target
    )
    factor = f.broadcast(f.get(f["factor"]), lanes)
    with f.range(0, f["columns"], _VECTORS * lanes) as first:
        columns = [f.sum(first, v * lanes) for v in range(_VECTORS)]
        masks = [f.first_lanes(f.minus(f["columns"], e)) for e in columns]
        with f.carrying(f.whole(0), f["keys"], 1, [dot.nothing(f)] * _VECTORS) as carry:
            row = f.at(f["v"], f.product(carry.index, f["distance"]), "i16")
            weight = f.broadcast(f.get(f["p"], carry.index), lanes)
            values = [_widened(f, row, e, m) for e, m in zip(columns, masks, strict=True)]
            pairs = zip(values, carry.values, strict=True)
            carry.next([f.fma(weight, value, total) for value, total in pairs])
        for e, mask, total in zip(columns, masks, carry.results, strict=True):
            y = _as_result(f, dot, f.mul(total, factor), result)
            f.store_masked(y, f.at(f["to"], e, result), mask)
    return f


def _widened(f: MlirRoutine, row: SsaValue, at: SsaValue, mask: SsaValue) -> SsaValue:
    return decode(f, f.load_masked(f.at(row, at, "i16"), mask, "i16"), torch.bfloat16)

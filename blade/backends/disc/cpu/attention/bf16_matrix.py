# SPDX-License-Identifier: Apache-2.0
"""Attention's two matrix products on matrix tiles (emit/matrix_tiles.py).

    scores    P[s][query] = scale * sum_d K[s, d] * Q[d][query]     rows are keys, read in place
    values    O[query, e] += sum_s W[query][s] * V[s][e]            rows are queries

The weights of 16 queries are made as vectors of one key each, rounded to pairs of keys, and transposed in registers:
pairs of one query are then adjacent.
"""

from blade.backends.disc.cpu.attention import softmax
from blade.backends.disc.cpu.attention.bf16_tiles import routine
from blade.backends.disc.cpu.attention.block import Part
from blade.backends.disc.cpu.attention.tiles import transposed
from blade.backends.disc.cpu.emit.bf16_dot import PAIR, bf16_dot, paired
from blade.backends.disc.cpu.emit.matrix_tiles import (
    ROWS,
    STEP,
    TileSums,
    configured,
    run_rows,
)
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import Carry, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

DEPTH = PAIR * STEP
"""Scores need a depth that is a multiple of this."""


def scores(
    f: MlirRoutine,
    target: CpuTarget,
    vectors: int,
    part: Part,
    *,
    blocks: SsaValue,
    k: SsaValue,
    keys: SsaValue,
    p: SsaValue,
    scaled: SsaValue,
) -> None:
    """Emit the scores of ``keys`` keys for a block of ``vectors`` vectors of queries, times ``scale`` if ``scaled``."""
    width = vectors * target.lanes
    form = TileSums(bf16_dot(target), PAIR, "i16", vectors, width)
    functions = _functions(part, f"scores_tiles{vectors}", form)
    with configured(f, form.dot), f.range(0, keys, ROWS) as s:
        given = {"a": f.at(k, f.product(s, f["k_row"]), "i16"), "lda": f["k_row"]}
        given |= {"b": blocks, "k": f["depth"], "to": f.at(p, f.product(s, width))}
        run_rows(f, functions, given, f.least(f.minus(keys, s), ROWS))
    with f.when(scaled):
        scale = f.broadcast(f["scale"], target.lanes)
        with f.range(0, f.product(keys, width), target.lanes) as at:
            f.put(f.mul(f.get(p, at, lanes=target.lanes), scale), p, at)


def padded_pairs(f: MlirRoutine, keys: SsaValue) -> SsaValue:
    """The pairs of ``keys`` keys in whole steps."""
    return f.product(f.above(f.above(keys, PAIR), STEP), STEP)


def query_weights(target: CpuTarget, vectors: int) -> MlirRoutine:
    """``to[query][pair]``: ``exp(scale * (p - maximum))`` of ``padded`` pairs of keys, zeros from ``keys`` on.

    Otherwise as softmax.exponentials. ``scale`` is positive.
    """
    lanes = target.lanes
    arguments = "p:ptr keys:i64 padded:i64 scale:f32 maxima:ptr totals:ptr factors:ptr to:ptr"
    f = routine(f"query_weights_{vectors}", arguments, target)
    now = softmax.running_maxima(f, vectors)
    scale = f.broadcast(f["scale"], lanes)
    whole = f.floor_to(f.over(f["keys"], PAIR), lanes)
    sums = []
    for v in range(vectors):
        total = f.constant(0.0, "f32", lanes)
        for low, high, ends in ((f.whole(0), whole, False), (whole, f["padded"], True)):
            with f.carrying(low, high, lanes, [total]) as part:
                shift = now.shift[v]
                part.next([_square(f, target, vectors, v, part, shift, scale, ends)])
            [total] = part.results
        sums.append(total)
    softmax.renew(f, now, sums, scale)
    return f


def _square(
    f: MlirRoutine,
    target: CpuTarget,
    vectors: int,
    v: int,
    part: Carry,
    shift: SsaValue,
    scale: SsaValue,
    ends: bool,
) -> SsaValue:
    """Store the weights of a vector of queries for as many pairs of keys; their sum. ``ends``: keys may be missing."""
    lanes, width, at = target.lanes, vectors * target.lanes, part.index
    dot, nothing = bf16_dot(target), f.constant(0.0, "f32", lanes)
    total, rows = part.values[0], []
    for k in range(lanes):
        both = []
        for r in range(PAIR):
            key = f.sum(f.product(f.sum(at, k), PAIR), r)
            # what follows the last key is other scratch, which is read and not used
            x = f.get(f["p"], f.sum(f.product(key, width), v * lanes), lanes=lanes)
            y = softmax.exp_below_zero(f, f.mul(f.sub(x, shift), scale))
            if ends:
                y = f.select(f.broadcast(f.test("slt", key, f["keys"]), lanes), y, nothing)
            total = f.add(total, y)
            both.append(dot.narrowed(f, y))
        rows.append(paired(f, *both))
    for k, column in enumerate(transposed(f, rows)):
        f.put(column, f["to"], f.sum(f.product(f["padded"], v * lanes + k), at))
    return total


def multiply(
    f: MlirRoutine,
    target: CpuTarget,
    vectors: int,
    part: Part,
    *,
    fresh: SsaValue,
    v: SsaValue,
    padded: SsaValue,
    keys: SsaValue,
    sums: SsaValue,
    weights: SsaValue,
) -> None:
    """Emit ``sums += W * V``; ``fresh``: from zero. ``padded``: columns of V and of the sums, whole vectors.

    ``v`` has room for ``padded_pairs`` rows; ``weights`` are as many words per query.
    """
    lanes, width = target.lanes, vectors * target.lanes
    pairs, whole = f.above(keys, PAIR), padded_pairs(f, keys)
    _clear(f, v, f.product(pairs, padded), f.product(whole, padded), lanes)
    with f.when(fresh):
        _clear(f, sums, f.whole(0), f.product(padded, width), lanes)
    start = f.whole(0)
    with configured(f, bf16_dot(target)):
        for columns in (2, 1):
            form = TileSums(bf16_dot(target), PAIR, "i16", columns, None, adds=True)
            functions = _functions(part, f"values_tiles{columns}", form)
            end = f.sum(start, f.floor_to(f.minus(padded, start), columns * STEP))
            with f.range(start, end, columns * STEP) as column:
                given = {"a": weights, "lda": f.product(whole, PAIR), "b": f.at(v, column)}
                given |= {"k": f.product(whole, PAIR), "to": f.at(sums, column), "width": padded}
                run_rows(f, functions, given, f["count"])
            start = end


def _functions(part: Part, name: str, form: TileSums) -> tuple[MlirRoutine, MlirRoutine]:
    one, two = (form.function(f"attention_bf16_{name}_{count}", count) for count in (1, 2))
    part(one)
    part(two)
    return one, two


def _clear(f: MlirRoutine, pointer: SsaValue, low: SsaValue, high: SsaValue, lanes: int) -> None:
    zeros = f.constant(0.0, "f32", lanes)
    with f.range(low, high, lanes) as at:
        f.put(zeros, pointer, at)

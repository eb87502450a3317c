# SPDX-License-Identifier: Apache-2.0
"""Attention's two matrix products on matrix tiles (emit/matrix_tiles.py).

    scores    P[s][query] = scale * sum_d K[s, d] * Q[d][query]     rows are keys, read in place
    values    O[query, e] += sum_s W[query][s] * V[s][e]            rows are queries

Weights, which lie as pairs of one query per lane, are transposed first: pairs of one query are then adjacent.
"""

from blade.backends.disc.cpu.attention.bf16_tiles import routine
from blade.backends.disc.cpu.attention.block import Part
from blade.backends.disc.cpu.attention.tiles import transposed
from blade.backends.disc.cpu.emit.bf16_dot import PAIR, bf16_dot
from blade.backends.disc.cpu.emit.matrix_tiles import (
    ROWS,
    STEP,
    TileSums,
    configured,
    run_rows,
)
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirRoutine
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
) -> None:
    """Emit the scores of ``keys`` keys for a block of ``vectors`` vectors of queries."""
    width = vectors * target.lanes
    form = TileSums(bf16_dot(target), PAIR, "i16", vectors, width)
    functions = _functions(part, f"scores_tiles{vectors}", form)
    with configured(f, form.dot), f.range(0, keys, ROWS) as s:
        given = {"a": f.at(k, f.product(s, f["k_row"]), "i16"), "lda": f["k_row"]}
        given |= {"b": blocks, "k": f["depth"], "to": f.at(p, f.product(s, width))}
        run_rows(f, functions, given, f.least(f.minus(keys, s), ROWS))
    scale = f.broadcast(f["scale"], target.lanes)
    with f.range(0, f.product(keys, width), target.lanes) as at:
        f.put(f.mul(f.get(p, at, lanes=target.lanes), scale), p, at)


def padded_pairs(f: MlirRoutine, keys: SsaValue) -> SsaValue:
    """The pairs of ``keys`` keys in whole steps."""
    return f.product(f.above(f.above(keys, PAIR), STEP), STEP)


def weights_by_query(target: CpuTarget, vectors: int) -> MlirRoutine:
    """``to[query][pair] = p[pair][query]`` for ``padded`` pairs; those from ``pairs`` on are zeros."""
    lanes, width = target.lanes, vectors * target.lanes
    f = routine(f"weights_by_query_{vectors}", "p:ptr pairs:i64 padded:i64 to:ptr", target)
    nothing = f.constant(0, "i32", lanes)
    for first in range(0, width, lanes):
        with f.range(0, f["padded"], lanes) as at:
            rows = []
            for k in range(lanes):
                pair = f.sum(at, k)
                # the last pairs' place is followed by other scratch, which is read and not used
                row = f.get(f["p"], f.sum(f.product(pair, width), first), "i32", lanes)
                rows.append(f.select(f.test("slt", pair, f["pairs"]), row, nothing))
            for k, column in enumerate(transposed(f, rows)):
                f.put(column, f["to"], f.sum(f.product(f["padded"], first + k), at))
    return f


def multiply(
    f: MlirRoutine,
    target: CpuTarget,
    vectors: int,
    part: Part,
    *,
    fresh: SsaValue,
    p: SsaValue,
    v: SsaValue,
    padded: SsaValue,
    keys: SsaValue,
    sums: SsaValue,
    weights: SsaValue,
) -> None:
    """Emit ``sums += W * V``; ``fresh``: from zero. ``padded``: columns of V and of the sums, whole vectors.

    ``v`` has room for ``padded_pairs`` rows, ``weights`` for as many words per query.
    """
    lanes, width = target.lanes, vectors * target.lanes
    pairs, whole = f.above(keys, PAIR), padded_pairs(f, keys)
    turn = part(weights_by_query(target, vectors))
    f.run(turn, p=p, pairs=pairs, padded=whole, to=weights)
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

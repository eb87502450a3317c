# SPDX-License-Identifier: Apache-2.0
"""Units of attention on bfloat16: a block of one head's queries (as in block.py), or few queries one by one."""

from functools import partial

from blade.backends.disc.cpu.attention import bf16_matrix as matrix
from blade.backends.disc.cpu.attention import bf16_tiles as pairs
from blade.backends.disc.cpu.attention import decode, softmax
from blade.backends.disc.cpu.attention.block import (
    BLOCK_KEYS,
    Part,
    add_bias_and_mask,
    invert,
    score_rows,
    start_softmax,
)
from blade.backends.disc.cpu.attention.block import UNIT as _UNIT
from blade.backends.disc.cpu.attention.tiles import key_rows
from blade.backends.disc.cpu.emit.bf16_dot import PAIR
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

# Registers -> vectors of a row of values -> queries per tile, which divide a block: the sums fit the registers.
_TILES = {32: {4: 4, 2: 8, 1: 8}, 16: {2: 4, 1: 4}}


def bf16_block_unit(target: CpuTarget, vectors: int, result: str, part: Part) -> MlirFunction:
    """One unit of up to ``vectors`` vectors of queries; ``result``: the element type of O."""
    lanes, width = target.lanes, vectors * target.lanes
    f = pairs.routine(f"block_{vectors}", _UNIT, target)
    rows = {n: part(pairs.score_tile(target, vectors, n)) for n in key_rows(target)}
    main, rest = rows
    room = f.sum(f.least(f["all_keys"], BLOCK_KEYS), main)
    padded = f.product(f.above(f["columns"], lanes), lanes)
    blocks = f["scratch"]
    p = f.at(blocks, f.product(f.above(f["depth"], PAIR), width))
    maxima = f.at(p, f.product(room, width))
    totals, factors, sums = (f.at(maxima, k * width) for k in (1, 2, 3))
    values = f.at(sums, f.product(padded, width))
    start_softmax(f, vectors, maxima, totals)
    load = part(pairs.load_queries(target, vectors))
    f.run(load, q=f["q"], distance=f["q_row"], count=f["count"], depth=f["depth"], blocks=blocks)
    # without keys there is still one round, which writes the result of an empty row
    with f.range(0, f.most(f["keys"], 1), BLOCK_KEYS) as s0:
        n = f.least(f.minus(f["keys"], s0), BLOCK_KEYS)
        some = {
            "blocks": blocks,
            "k": f.at(f["k"], f.product(s0, f["k_row"]), "i16"),
            "keys": n,
            "p": p,
        }
        by_rows = partial(score_rows, f, rows, main, rest, width, **some, element="i16")
        if target.has_bf16_tiles:
            in_tiles, early, late = _scaling(f)
            with f.when(in_tiles):
                matrix.scores(f, target, vectors, part, **some, scaled=early)
                f.branch()
                by_rows(scale=f["scale"])
        else:
            by_rows(scale=f["scale"])
        add_bias_and_mask(f, target, vectors, part, p=p, s0=s0, keys=n)
        running = {"maxima": maxima, "totals": totals, "factors": factors}
        if target.has_bf16_tiles:
            most = matrix.padded_pairs(f, f.least(f["all_keys"], BLOCK_KEYS))
            weights = f.at(values, f.product(most, padded))
            make = part(matrix.query_weights(target, vectors))
            given = {"p": p, "keys": n, "padded": matrix.padded_pairs(f, n), "scale": late}
            f.run(make, **given, **running, to=weights)
        else:
            f.run(part(softmax.exponentials(target, vectors)), p=p, keys=n, **running)
        with f.when(f.test("ne", s0, 0)):
            scale = part(softmax.rescale(target))
            f.run(scale, sums=sums, count=f["count"], columns=padded, factors=factors)
        first = f.at(f["v"], f.product(s0, f["v_row"]), "i16")
        to_pairs = {"v": first, "distance": f["v_row"], "rows": n, "columns": f["columns"]}
        f.run(part(pairs.pair_values(target)), **to_pairs, padded=padded, to=values)
        same = {"v": values, "padded": padded, "keys": n, "sums": sums}
        same["fresh"] = f.test("eq", s0, 0)
        if target.has_bf16_tiles:
            matrix.multiply(f, target, vectors, part, **same, weights=weights)
        else:
            f.run(part(pairs.narrow_weights(target, vectors)), p=p, keys=n)
            _multiply(f, target, width, part, p=p, **same)
    invert(f, vectors, totals, factors)
    f.run(
        part(pairs.finish(target, result)),
        sums=sums,
        padded=padded,
        factors=factors,
        to=f["o"],
        distance=f["o_row"],
        rows=f["count"],
        columns=f["columns"],
    )
    return f


def _scaling(f: MlirRoutine) -> tuple[SsaValue, SsaValue, SsaValue]:
    """Whether tiles make the scores, whether they are scaled at once, and what their weights' function multiplies by.

    Scores without a cap, a bias and a sink are scaled by that function, which knows their maximum.
    """
    in_tiles = f.test("eq", f.rest(f["depth"], matrix.DEPTH), 0)
    has_sign = f.compare("ole", f["scale"], f.constant(0.0, "f32"))
    has_sink = f.compare("une", f["sink"], f.constant(-float("inf"), "f32"))
    early = has_sign
    for one in (f["has_bias"], f["has_cap"], has_sink):
        early = f.apply("arith.ori", early, one)
    is_late = f.both(in_tiles, f.apply("arith.xori", early, f.constant(1, "i1")))
    return in_tiles, early, f.select(is_late, f["scale"], f.constant(1.0, "f32"))


def _multiply(f: MlirRoutine, target: CpuTarget, width: int, part: Part, **given: SsaValue) -> None:
    """All tiles of weights times values; queries beyond the last are computed and not read."""
    start, padded = f.whole(0), given["padded"]
    for vectors, most in _TILES[target.registers].items():
        rows = min(most, width)
        tile = part(pairs.value_tile(target, rows, vectors))
        step = vectors * target.lanes
        end = f.sum(start, f.floor_to(f.minus(padded, start), step))
        with f.range(start, end, step) as column, f.range(0, f["count"], rows) as row:
            at = f.sum(f.product(row, padded), column)
            own = {"p": f.at(given["p"], row), "v": f.at(given["v"], column)}
            f.run(tile, **{**given, **own, "sums": f.at(given["sums"], at)}, width=f.whole(width))
        start = end


def bf16_few(target: CpuTarget, result: str, part: Part) -> MlirFunction:
    """One unit, query by query."""
    f = pairs.routine("few", _UNIT, target)
    dots, values = part(pairs.dots(target)), part(pairs.row_of_values(target, result))
    exponentials, cap_row = part(decode.row_exponentials(target)), part(decode.cap_row(target))
    nothing, factor, p = f["scratch"], f.at(f["scratch"], 1), f.at(f["scratch"], 16)
    f.put(f.constant(0.0, "f32"), nothing)
    with f.range(0, f["count"]) as r:
        seen = f.least(f["keys"], f.sum(f["first"], r, 1))
        keys = f.select(f["causal"], seen, f["keys"])
        bias = f.at(f["bias"], f.product(r, f["bias_query"]))
        decode.score_row(
            f,
            (dots, cap_row),
            (bias, nothing),
            p=p,
            keys=keys,
            q=f.at(f["q"], f.product(r, f["q_row"]), "i16"),
            scale=f["scale"],
            k=f["k"],
            distance=f["k_row"],
            depth=f["depth"],
        )
        f.run(exponentials, p=p, keys=keys, sink=f["sink"], empty=f["empty"], factor=factor)
        f.run(
            values,
            p=p,
            v=f["v"],
            distance=f["v_row"],
            keys=keys,
            factor=factor,
            to=f.at(f["o"], f.product(r, f["o_row"]), result),
            columns=f["columns"],
        )
    return f

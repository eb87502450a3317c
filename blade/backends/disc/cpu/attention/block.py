# SPDX-License-Identifier: Apache-2.0
"""One unit of attention: a block of one head's queries against all of its keys, ``BLOCK_KEYS`` at a time."""

from collections.abc import Callable

from blade.backends.disc.cpu.attention import softmax, tiles
from blade.backends.disc.cpu.emit import elementary as math
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.target.cpu import CpuTarget

Part = Callable[[MlirFunction], MlirFunction]  # adds a function to the text, once
BLOCK_KEYS = 512

UNIT = (
    "q:ptr k:ptr v:ptr bias:ptr o:ptr scratch:ptr first:i64 count:i64 keys:i64 all_keys:i64 depth:i64 "
    "columns:i64 causal:i1 empty:f32 sink:f32 scale:f32 cap:f32 has_cap:i1 has_bias:i1 fill:f32 "
    "q_row:i64 k_row:i64 v_row:i64 o_row:i64 bias_query:i64 bias_key:i64"
)
LOGS = " logs:ptr"


def block_unit(
    target: CpuTarget, vectors: int, multiply: MlirFunction, part: Part, logs: bool
) -> MlirFunction:
    """One unit of up to ``vectors`` vectors of queries; ``logs``: also write log(sum(exp(scores)))."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(f"attention_f32_block_{vectors}", UNIT + LOGS * logs, lanes)
    main, rest = tiles.key_rows(target)
    parts = {rows: part(tiles.score_tile(target, vectors, rows)) for rows in (main, rest)}
    room = f.add(f.least(f["all_keys"], f.number(BLOCK_KEYS)), f.number(main))
    padded = f.mul(f.above(f["columns"], lanes), f.number(lanes))
    blocks = f["scratch"]
    p = f.at(blocks, f.mul(f["depth"], f.number(width)))
    maxima = f.at(p, f.mul(room, f.number(width)))
    totals, factors = f.at(maxima, width), f.at(maxima, 2 * width)
    ones, sums = f.at(maxima, 3 * width), f.at(maxima, 4 * width)
    start_softmax(f, vectors, maxima, totals)
    for v in range(vectors):
        f.store(f.constant(1.0, "f32", lanes), f.at(ones, v * lanes))
    query = {"q": f["q"], "distance": f["q_row"], "scale": f["scale"]}
    load = part(tiles.load_queries(target, vectors))
    f.run(load, **query, count=f["count"], depth=f["depth"], blocks=blocks)
    # without keys there is still one round, which writes the result of an empty row
    with f.loop(f.number(0), f.most(f["keys"], f.number(1)), BLOCK_KEYS) as s0:
        left = f.sub(f["keys"], s0)
        n = f.least(left, f.number(BLOCK_KEYS))
        k = f.at(f["k"], f.mul(s0, f["k_row"]))
        score_rows(f, parts, main, rest, width, blocks=blocks, k=k, keys=n, p=p)
        add_bias_and_mask(f, target, vectors, part, p=p, s0=s0, keys=n)
        step = part(softmax.exponentials(target, vectors))
        f.run(step, p=p, keys=n, maxima=maxima, totals=totals, factors=factors)
        fresh = f.compare("eq", s0, f.number(0))
        with f.when(f.compare("ne", s0, f.number(0))):
            scale = part(softmax.rescale(target))
            f.run(scale, sums=sums, count=f["count"], columns=padded, factors=factors)
        is_last = f.compare("sle", left, f.number(BLOCK_KEYS))
        with f.when(is_last):
            invert(f, vectors, totals, factors)
            if logs:
                _logarithms(f, vectors, maxima, totals)
        f.run(
            multiply,
            p=p,
            p_distance=f.number(width),
            v=f.at(f["v"], f.mul(s0, f["v_row"])),
            distance=f["v_row"],
            depth=n,
            fresh=fresh,
            sums=sums,
            sums_distance=padded,
            factors=f.either(is_last, factors, ones),
            to=f.either(is_last, f["o"], sums),
            to_distance=f.select(is_last, f["o_row"], padded),
            rows=f["count"],
            columns=f["columns"],
        )
    return f


def start_softmax(f: MlirFunction, vectors: int, maxima: SsaValue, totals: SsaValue) -> None:
    """The running maximum and sum before the first key: those of the sink, which is -inf if there is none."""
    lanes = f.lanes
    sink = f.broadcast(f["sink"], lanes)
    one, zero, never = (f.constant(x, "f32", lanes) for x in (1.0, 0.0, -float("inf")))
    total = f.select(f.compare("oeq", sink, never), zero, one)
    for v in range(vectors):
        f.store(sink, f.at(maxima, v * lanes))
        f.store(total, f.at(totals, v * lanes))


def score_rows(
    f: MlirFunction,
    parts: dict[int, MlirFunction],
    main: int,
    rest: int,
    width: int,
    blocks: SsaValue,
    k: SsaValue,
    keys: SsaValue,
    p: SsaValue,
    *,
    element: str = "f32",
    scale: SsaValue | None = None,
) -> None:
    """Tiles of scores. The last tile may repeat keys; their scores go to scratch that is never read.

    ``element``: that of K; ``scale``: what the tiles multiply by, where the queries are not scaled.
    """
    few_left = f.floor_to(keys, main)
    left = f.sub(keys, few_left)
    small = f.compare("sle", left, f.number(rest))
    whole = f.select(small, few_left, keys)

    def tile(rows: int, s: SsaValue) -> None:
        at, to = f.at(k, f.mul(s, f["k_row"]), element), f.at(p, f.mul(s, f.number(width)))
        count = f.sub(keys, s)
        same = {"blocks": blocks, "distance": f["k_row"], "depth": f["depth"]}
        same |= {} if scale is None else {"scale": scale}
        f.run(parts[rows], **same, k=at, count=count, p=to)

    with f.loop(f.number(0), whole, main) as s:
        tile(main, s)
    with f.loop(whole, keys, rest) as s:
        tile(rest, s)


def add_bias_and_mask(
    f: MlirFunction,
    target: CpuTarget,
    vectors: int,
    part: Part,
    p: SsaValue,
    s0: SsaValue,
    keys: SsaValue,
) -> None:
    """Cap the scores of a block of keys, and add the bias and the mask."""
    with f.when(f["has_cap"]):
        f.run(part(softmax.cap_scores(target, vectors)), p=p, keys=keys, cap=f["cap"])
    with f.when(f["has_bias"]):
        bias = f.at(f["bias"], f.mul(s0, f["bias_key"]))
        same = {"p": p, "keys": keys, "bias": bias, "distance": f["bias_key"]}
        same["fill"] = f["fill"]
        with f.when(f.compare("eq", f["bias_query"], f.number(0))):
            f.run(part(softmax.add_key_bias(target, vectors)), **same)
            f.branch()
            full = part(softmax.add_bias(target, vectors))
            f.run(full, **same, count=f["count"], query_distance=f["bias_query"])
    with f.when(f["causal"]):
        first = f.sub(f["first"], s0)
        f.run(part(softmax.mask_future(target, vectors)), p=p, keys=keys, first=first)


def invert(f: MlirFunction, vectors: int, totals: SsaValue, factors: SsaValue) -> None:
    """The final factors of the sums, 1 / total. A row without keys has no total."""
    lanes = f.lanes
    one, zero = (f.constant(x, "f32", lanes) for x in (1.0, 0.0))
    empty = f.broadcast(f["empty"], lanes)
    for v in range(vectors):
        total = f.load(f.at(totals, v * lanes), lanes)
        factor = f.select(f.compare("oeq", total, zero), empty, f.div(one, total))
        f.store(factor, f.at(factors, v * lanes))


def _logarithms(f: MlirFunction, vectors: int, maxima: SsaValue, totals: SsaValue) -> None:
    """log(sum(exp(scores))) of the block's queries; -inf for a row without keys."""
    lanes = f.lanes
    for v in range(vectors):
        top, total = (f.load(f.at(x, v * lanes), lanes) for x in (maxima, totals))
        mask = f.first_lanes(f.sub(f["count"], f.number(v * lanes)))
        f.store_masked(f.add(top, math.log(f, total)), f.at(f["logs"], v * lanes), mask)


def values_product(target: CpuTarget, part: Part) -> MlirFunction:
    """All tiles of ``rows`` queries times ``columns`` columns of V."""
    f = MlirFunction(
        "attention_f32_values",
        tiles.VALUE_ARGUMENTS + " rows:i64 columns:i64",
        target.lanes,
    )
    sizes, start = tiles.value_tiles(target), f.number(0)
    for vectors, counts in sizes.items():
        step = vectors * target.lanes
        end = f.add(start, f.floor_to(f.sub(f["columns"], start), step))
        made = [part(tiles.value_tile(target, rows, vectors)) for rows in counts]
        with f.loop(start, end, step) as column:
            _rows(f, made, counts, column)
        start = end
    made = [part(tiles.value_tile(target, rows, 1, masked=True)) for rows in sizes[1]]
    with f.when(f.compare("slt", start, f["columns"])):
        _rows(f, made, sizes[1], start, columns=f.sub(f["columns"], start))
    return f


def _rows(
    f: MlirFunction,
    made: list[MlirFunction],
    counts: tuple[int, ...],
    column: SsaValue,
    **extra: SsaValue,
) -> None:
    """Tiles along the queries for one group of columns, large tiles first."""
    start = f.number(0)
    same = {n: f[n] for n in ("p_distance", "distance", "depth", "fresh")}
    same |= {n: f[n] for n in ("sums_distance", "to_distance")}
    values = f.at(f["v"], column)
    for tile, rows in zip(made, counts, strict=True):
        end = f.add(start, f.floor_to(f.sub(f["rows"], start), rows))
        with f.loop(start, end, rows) as row:
            sums = f.at(f["sums"], f.add(column, f.mul(row, f["sums_distance"])))
            to = f.at(f["to"], f.add(column, f.mul(row, f["to_distance"])))
            p, factors = f.at(f["p"], row), f.at(f["factors"], row)
            f.run(tile, p=p, v=values, sums=sums, factors=factors, to=to, **same, **extra)
        start = end

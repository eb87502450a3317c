# SPDX-License-Identifier: Apache-2.0
"""Attention's two matrix products, in small register tiles.

A block of queries lies transposed in scratch, one query per lane (``blocks[d][query]``), so that keys and
values are read in place, row by row:

    scores    P[s][query] = sum_d K[s, d] * Q[d][query]      a key's element is broadcast
    values    O[query, e] = sum_s P[s][query] * V[s, e]      a probability is broadcast
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.target.cpu import CpuTarget

VECTORS = 2  # of queries per block, at most


def key_rows(target: CpuTarget) -> tuple[int, int]:
    """Keys per tile of scores: in the main loop, and in the loop over the remaining keys."""
    return (8, 4) if target.registers == 32 else (6, 3)


def value_tiles(target: CpuTarget) -> dict[int, tuple[int, ...]]:
    """Vectors of a value row -> queries per tile, largest first; the sums fit the registers."""
    if target.registers == 32:
        return {4: (4, 1), 2: (8, 2, 1), 1: (8, 2, 1)}
    return {2: (4, 1), 1: (6, 2, 1)}


def transposed(f: MlirFunction, rows: Sequence[SsaValue]) -> list[SsaValue]:
    """The columns of a square of vectors, in log2(lanes) rounds; each round interleaves the two halves."""
    lanes, rows = len(rows), list(rows)
    assert all(r.lanes == lanes for r in rows), rows
    low = [k // 2 + (k % 2) * lanes for k in range(lanes)]
    high = [k + lanes // 2 for k in low]
    for _ in range(lanes.bit_length() - 1):
        pairs = [(rows[k], rows[k + lanes // 2]) for k in range(lanes // 2)]
        rows = [_shuffled(f, a, b, picks) for a, b in pairs for picks in (low, high)]
    return rows


def _shuffled(f: MlirFunction, a: SsaValue, b: SsaValue, picks: Sequence[int]) -> SsaValue:
    words = f"vector.shuffle {a.name}, {b.name} [{', '.join(map(str, picks))}]"
    return f.op(f"{words} : {a.type}, {b.type}", a.element, a.lanes)


def clamped_rows(
    f: MlirFunction,
    base: SsaValue,
    distance: SsaValue,
    count: SsaValue,
    rows: int,
    element: str = "f32",
) -> list[SsaValue]:
    """Addresses of ``rows`` rows; rows from ``count`` on repeat the last one."""
    last = f.sub(count, f.number(1))
    numbers = [f.least(f.number(r), last) for r in range(rows)]
    return [f.at(base, f.mul(number, distance), element) for number in numbers]


def load_queries(target: CpuTarget, vectors: int) -> MlirFunction:
    """``blocks[d][query] = q[query, d] * scale``; lanes from ``count`` on repeat the last query."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_queries_{vectors}",
        "q:ptr distance:i64 count:i64 depth:i64 scale:f32 blocks:ptr",
        lanes,
    )
    pointers = clamped_rows(f, f["q"], f["distance"], f["count"], width)
    scale = f.broadcast(f["scale"], lanes)
    whole, one = f.floor_to(f["depth"], lanes), f.number(1)
    transpose_rows(
        f,
        StridedRows(pointers, one, whole, f["depth"]),
        f["blocks"],
        lambda column, to: f.store(f.mul(column, scale), to),
    )
    return f


@dataclass(frozen=True)
class StridedRows:
    """``rows`` rows of ``length`` elements, ``distance`` apart; the first ``whole`` elements are adjacent."""

    rows: Sequence[SsaValue]
    distance: SsaValue
    whole: SsaValue
    length: SsaValue


def transpose_rows(
    f: MlirFunction, matrix: StridedRows, base: SsaValue, put: Callable[[SsaValue, SsaValue], None]
) -> None:
    """Call ``put(column, address)`` for every vector of each column; addresses count up from ``base``.

    Squares of adjacent elements are transposed in registers.
    """
    lanes, width = f.lanes, len(matrix.rows)
    for first in range(0, width, lanes):
        rows = matrix.rows[first : first + lanes]
        with f.loop(f.number(0), matrix.whole, lanes) as i:
            columns = transposed(f, [f.load(f.at(p, i), lanes) for p in rows])
            at = f.at(f.at(base, f.mul(i, f.number(width))), first)
            for k, column in enumerate(columns):
                put(column, f.at(at, k * width))
        with f.loop(matrix.whole, matrix.length, 1) as i:
            offset = f.mul(i, matrix.distance)
            column = f.from_lanes([f.load(f.at(p, offset)) for p in rows])
            put(column, f.at(f.at(base, f.mul(i, f.number(width))), first))


def score_tile(target: CpuTarget, vectors: int, rows: int) -> MlirFunction:
    """``p[s][query]`` for ``rows`` keys; keys from ``count`` on repeat the last key's scores."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_scores_{rows}x{vectors}",
        "blocks:ptr k:ptr distance:i64 count:i64 depth:i64 p:ptr",
        lanes,
    )
    keys = clamped_rows(f, f["k"], f["distance"], f["count"], rows)
    sums = [f.constant(0.0, "f32", lanes)] * (rows * vectors)
    whole = f.floor_to(f["depth"], 4)
    for low, high, unroll in ((f.number(0), whole, 4), (whole, f["depth"], 1)):
        with f.carrying(low, high, unroll, sums) as carry:
            queries = f.at(f["blocks"], f.mul(carry.index, f.number(width)))
            starts = [f.at(key, carry.index) for key in keys]
            sums = carry.values
            for u in range(unroll):
                q = [f.load(f.at(queries, u * width + v * lanes), lanes) for v in range(vectors)]
                new = []
                for r in range(rows):
                    key = f.broadcast(f.load(f.at(starts[r], u)), lanes)
                    new += [f.fma(key, q[v], sums[r * vectors + v]) for v in range(vectors)]
                sums = new
            carry.next(sums)
        sums = carry.results
    for r in range(rows):
        for v in range(vectors):
            f.store(sums[r * vectors + v], f.at(f["p"], r * width + v * lanes))
    return f


VALUE_ARGUMENTS = (
    "p:ptr p_distance:i64 v:ptr distance:i64 depth:i64 fresh:i1 sums:ptr sums_distance:i64 "
    "factors:ptr to:ptr to_distance:i64"
)


def value_tile(target: CpuTarget, rows: int, vectors: int, masked: bool = False) -> MlirFunction:
    """``to[query, e] = (sums[query, e] + sum_s p[s][query] * v[s, e]) * factors[query]``.

    ``fresh``: take ``sums`` as zeros. ``masked``: a single vector, of which only ``columns`` lanes exist.
    """
    lanes = target.lanes
    name = f"attention_f32_values_{rows}x{'m' if masked else vectors}"
    f = MlirFunction(name, VALUE_ARGUMENTS + (" columns:i64" if masked else ""), lanes)
    mask = f.first_lanes(f["columns"]) if masked else None
    totals = [f.constant(0.0, "f32", lanes)] * (rows * vectors)
    whole = f.floor_to(f["depth"], 2)
    for low, high, unroll in ((f.number(0), whole, 2), (whole, f["depth"], 1)):
        with f.carrying(low, high, unroll, totals) as carry:
            totals = carry.values
            for u in range(unroll):
                s = f.add(carry.index, f.number(u)) if u else carry.index
                row = f.at(f["v"], f.mul(s, f["distance"]))
                values = [_part(f, f.at(row, v * lanes), mask) for v in range(vectors)]
                start = f.at(f["p"], f.mul(s, f["p_distance"]))
                new = []
                for r in range(rows):
                    weight = f.broadcast(f.load(f.at(start, r)), lanes)
                    new += [
                        f.fma(weight, values[v], totals[r * vectors + v]) for v in range(vectors)
                    ]
                totals = new
            carry.next(totals)
        totals = carry.results
    zeros = f.constant(0.0, "f32", lanes)
    for r in range(rows):
        factor = f.broadcast(f.load(f.at(f["factors"], r)), lanes)
        before = f.at(f["sums"], f.mul(f["sums_distance"], f.number(r)))
        to = f.at(f["to"], f.mul(f["to_distance"], f.number(r)))
        for v in range(vectors):
            old = _part(f, f.at(before, v * lanes), mask)
            old = f.select(f["fresh"], zeros, old)
            y = f.mul(f.add(totals[r * vectors + v], old), factor)
            if mask is None:
                f.store(y, f.at(to, v * lanes))
            else:
                f.store_masked(y, to, mask)
    return f


def _part(f: MlirFunction, address: SsaValue, mask: SsaValue | None) -> SsaValue:
    return f.load(address, f.lanes) if mask is None else f.load_masked(address, mask)


def copy_rows(target: CpuTarget) -> MlirFunction:
    """``to[r, c] = from[r, c]``; the rows of ``to`` are adjacent."""
    lanes = target.lanes
    f = MlirFunction("attention_f32_copy", "x:ptr distance:i64 rows:i64 columns:i64 to:ptr", lanes)
    whole = f.floor_to(f["columns"], lanes)
    with f.loop(f.number(0), f["rows"], 1) as r:
        x, to = f.at(f["x"], f.mul(r, f["distance"])), f.at(f["to"], f.mul(r, f["columns"]))
        with f.loop(f.number(0), whole, lanes) as c:
            f.store(f.load(f.at(x, c), lanes), f.at(to, c))
        with f.loop(whole, f["columns"], 1) as c:
            f.store(f.load(f.at(x, c)), f.at(to, c))
    return f

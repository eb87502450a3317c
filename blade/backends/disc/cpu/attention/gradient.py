# SPDX-License-Identifier: Apache-2.0
"""The generated gradient of attention (flash_attention.py); the matrix of weights is never stored.

    attention_f32_gradient(ptrs = G, Q, K, V, bias, logs, delta, result, scratch; ints = ARGUMENTS)
    units = heads x (blocks of queries, then blocks of keys)

For dQ, a unit holds one head's block of queries in its lanes and walks all keys. For dK and dV, it holds a
block of keys and walks all queries. So units write disjoint results, and all scores are computed twice. The
operands in lanes lie transposed in scratch, and the walked rows are copied together, ``BLOCK`` at a time:

    p[row][lane] = exp(scale * x_lane . r_row + bias - logs)      x, r: a query and a key, or a key and a query
    d[row][lane] = p * (y_lane . s_row - delta)                   y, s: their gradient and value, or the reverse
    dX += scale * d' r      dY += p' s
"""

import functools

import sympy

from blade.backends.disc.cpu.attention import softmax_gradient as slopes
from blade.backends.disc.cpu.attention import tiles
from blade.backends.disc.cpu.attention.block import Part, score_rows, values_product
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import ENTRY, MlirFunction
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.target.cpu import CpuTarget

NAME = "attention_f32_gradient"
BLOCK = 128  # rows per step: with 32 lanes, p and d take 32 KiB

TENSORS = ("g", "q", "k", "v", "bias")
ARGUMENTS = (
    *("batch", "heads", "queries", "keys", "depth", "columns", "causal", "scale", "has_bias"),
    *(f"{t}_{axis}" for t in TENSORS for axis in ("batch", "head")),
    *("g_row", "q_row", "k_row", "v_row", "bias_query", "bias_key"),
)
"""Sizes, flags, the bits of the scale, and strides in elements."""

_UNIT = (
    "x:ptr x_row:i64 y:ptr y_row:i64 first:i64 count:i64 r:ptr r_row:i64 s:ptr s_row:i64 start:i64 rows:i64 "
    "depth:i64 columns:i64 logs:ptr delta:ptr scale:f32 causal:i1 has_bias:i1 bias:ptr bias_lane:i64 "
    "bias_row:i64 to:ptr to_row:i64 other:ptr other_row:i64 scratch:ptr"
)


def lanes_of_unit(target: CpuTarget) -> int:
    """Queries, or keys, per unit."""
    return tiles.VECTORS * target.lanes


@functools.lru_cache(maxsize=4)
def gradient_text(target: CpuTarget) -> str:
    """MLIR of ``attention_f32_gradient`` and all functions that it calls."""
    parts: dict[str, MlirFunction] = {}

    def part(f: MlirFunction) -> MlirFunction:
        return parts.setdefault(f.name, f)

    multiply = part(values_product(target, part))
    widths = range(1, tiles.VECTORS + 1)
    units = {
        walks: [part(_unit(target, v, walks, multiply, part)) for v in widths]
        for walks in ("keys", "queries")
    }
    text = [f.text() for f in parts.values()]
    return "\n".join([*text, _entry(target, units).text(internal=False)]) + "\n"


def _scores(target: CpuTarget, vectors: int, part: Part) -> MlirFunction:
    """``p[row][lane] = blocks[.][lane] . k[row]``"""
    f = MlirFunction(
        f"attention_f32_rows_{vectors}",
        "blocks:ptr k:ptr k_row:i64 depth:i64 keys:i64 p:ptr",
        target.lanes,
    )
    main, rest = tiles.key_rows(target)
    made = {rows: part(tiles.score_tile(target, vectors, rows)) for rows in (main, rest)}
    width = vectors * target.lanes
    score_rows(f, made, main, rest, width, f["blocks"], f["k"], f["keys"], f["p"])
    return f


class _ScratchLayout:
    """Offsets in a unit's scratch."""

    def __init__(self, f: MlirFunction, target: CpuTarget, width: int) -> None:
        self._f, self._at = f, f["scratch"]
        room = BLOCK + tiles.key_rows(target)[0]
        self.x = self._take(f.mul(f["depth"], f.number(width)))
        self.y = self._take(f.mul(f["columns"], f.number(width)))
        self.p, self.d = (self._take(f.number(room * width)) for _ in range(2))
        self.ones, self.scales = (self._take(f.number(width)) for _ in range(2))
        self.depth, self.columns = (
            f.mul(f.above(f[n], target.lanes), f.number(target.lanes)) for n in ("depth", "columns")
        )
        self.to = self._take(f.mul(self.depth, f.number(width)))
        self.other = self._take(f.mul(self.columns, f.number(width)))
        self.r = self._take(f.mul(f["depth"], f.number(BLOCK)))
        self.s = self._at

    def _take(self, floats: SsaValue) -> SsaValue:
        taken, self._at = self._at, self._f.at(self._at, floats)
        return taken


def scratch_floats(target: CpuTarget, depth: Dim, columns: Dim, padded: sympy.Expr) -> sympy.Expr:
    """Floats of ``_ScratchLayout``; ``padded``: depth plus columns, each rounded up to whole vectors."""
    width, room = lanes_of_unit(target), BLOCK + tiles.key_rows(target)[0]
    both = sympy.sympify(depth) + columns
    return width * (both + 2 * room + 2 + padded) + BLOCK * both


def _unit(
    target: CpuTarget, vectors: int, walks: str, multiply: MlirFunction, part: Part
) -> MlirFunction:
    """One unit of up to ``vectors`` vectors of lanes."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(f"{NAME}_{walks}_{vectors}", _UNIT, lanes)
    scores, load = part(_scores(target, vectors, part)), part(tiles.load_queries(target, vectors))
    copy, room = part(tiles.copy_rows(target)), _ScratchLayout(f, target, width)
    one = f.constant(1.0, "f32")
    for v in range(vectors):
        f.store(f.broadcast(one, lanes), f.at(room.ones, v * lanes))
        f.store(f.broadcast(f["scale"], lanes), f.at(room.scales, v * lanes))
    x = {"q": f["x"], "distance": f["x_row"], "depth": f["depth"], "scale": f["scale"]}
    y = {"q": f["y"], "distance": f["y_row"], "depth": f["columns"], "scale": one}
    f.run(load, **x, count=f["count"], blocks=room.x)
    f.run(load, **y, count=f["count"], blocks=room.y)
    with f.loop(f["start"], f["rows"], BLOCK) as row:
        left = f.sub(f["rows"], row)
        n = f.least(left, f.number(BLOCK))
        for name, to, size in (("r", room.r, "depth"), ("s", room.s, "columns")):
            source = f.at(f[name], f.mul(row, f[f"{name}_row"]))
            f.run(copy, x=source, distance=f[f"{name}_row"], rows=n, columns=f[size], to=to)
        r, s = {"k": room.r, "k_row": f["depth"]}, {"k": room.s, "k_row": f["columns"]}
        f.run(scores, blocks=room.x, **r, depth=f["depth"], keys=n, p=room.p)
        f.run(scores, blocks=room.y, **s, depth=f["columns"], keys=n, p=room.d)
        slopes.add_bias_and_mask(f, target, vectors, walks, part, room.p, row, n)
        step = part(slopes.softmax_gradient(target, vectors, walks))
        first = f["first"] if walks == "keys" else row
        stats = {name: f.at(f[name], first) for name in ("logs", "delta")}
        f.run(step, p=room.p, d=room.d, rows=n, count=f["count"], **stats)
        is_last = f.compare("sle", left, f.number(BLOCK))
        product = {"p_distance": f.number(width), "depth": n, "rows": f["count"]}
        product["fresh"] = f.compare("eq", row, f["start"])
        results = [("to", room.d, room.r, "depth", room.depth, room.to, room.scales)]
        if walks == "queries":
            more = ("other", room.p, room.s, "columns", room.columns, room.other, room.ones)
            results.append(more)
        for name, weights, right, size, padded, sums, factors in results:
            f.run(
                multiply,
                **product,
                p=weights,
                v=right,
                distance=f[size],
                columns=f[size],
                sums=sums,
                sums_distance=padded,
                factors=f.either(is_last, factors, room.ones),
                to=f.either(is_last, f[name], sums),
                to_distance=f.select(is_last, f[f"{name}_row"], padded),
            )
    return f


def _entry(target: CpuTarget, units: dict[str, list[MlirFunction]]) -> MlirFunction:
    """The loop over units: a unit's number gives its head, and a block of queries or of keys."""
    f = MlirFunction(NAME, ENTRY, target.lanes)
    names = (*TENSORS, "logs", "delta", "result", "scratch")
    pointers = {n: f.load(f.at(f["ptrs"], k, "ptr"), 1, "ptr") for k, n in enumerate(names)}
    a = {n: f.load(f.at(f["ints"], k, "i64"), 1, "i64") for k, n in enumerate(ARGUMENTS)}
    size = lanes_of_unit(target)
    by_query, by_key = f.above(a["queries"], size), f.above(a["keys"], size)
    per_head = f.add(by_query, by_key)
    with f.loop(f["begin"], f["end"], 1) as unit:
        head = f.apply("arith.divui", unit, per_head)
        place = f.apply("arith.remui", unit, per_head)
        at = _head(f, pointers, a, head)
        with f.when(f.compare("slt", place, by_query)):
            first = f.mul(place, f.number(size))
            _run(f, units["keys"], "keys", first, at, a)
            f.branch()
            first = f.mul(f.sub(place, by_query), f.number(size))
            _run(f, units["queries"], "queries", first, at, a)
    return f


def _head(
    f: MlirFunction, pointers: dict[str, SsaValue], a: dict[str, SsaValue], head: SsaValue
) -> dict[str, SsaValue]:
    """The addresses of all operands and results for one head."""
    batch = f.apply("arith.divui", head, a["heads"])
    within = f.apply("arith.remui", head, a["heads"])
    found = {"scratch": pointers["scratch"]}
    for name in TENSORS:
        offset = f.add(f.mul(batch, a[f"{name}_batch"]), f.mul(within, a[f"{name}_head"]))
        found[name] = f.at(pointers[name], offset)
    for name in ("logs", "delta"):
        found[name] = f.at(pointers[name], f.mul(head, a["queries"]))
    start = pointers["result"]
    for name, places, width in (
        ("dq", "queries", "depth"),
        ("dk", "keys", "depth"),
        ("dv", "keys", "columns"),
    ):
        rows = f.mul(a["heads"], a[width])
        image = f.mul(a[places], rows)
        found[name] = f.at(start, f.add(f.mul(batch, image), f.mul(within, a[width])))
        found[f"{name}_row"] = rows
        start = f.at(start, f.mul(a["batch"], image))
    return found


def _run(
    f: MlirFunction,
    units: list[MlirFunction],
    walks: str,
    first: SsaValue,
    at: dict[str, SsaValue],
    a: dict[str, SsaValue],
) -> None:
    """Run the unit whose lanes hold the block of queries or keys that starts at ``first``."""
    zero, size = f.number(0), tiles.VECTORS * f.lanes
    causal = f.compare("ne", a["causal"], zero)
    if walks == "keys":
        x, y, r, s, places, to, other = "q", "g", "k", "v", "queries", "dq", "dq"
        count = f.least(f.sub(a[places], first), f.number(size))
        seen = f.least(a["keys"], f.add(first, count))
        start, rows = zero, f.select(causal, seen, a["keys"])
        bias_lane, bias_row = a["bias_query"], a["bias_key"]
    else:
        x, y, r, s, places, to, other = "k", "v", "q", "g", "keys", "dk", "dv"
        count = f.least(f.sub(a[places], first), f.number(size))
        last = f.floor_to(f.sub(a["queries"], f.number(1)), BLOCK)  # there is always one block
        start = f.select(causal, f.least(f.floor_to(first, BLOCK), last), zero)
        rows = a["queries"]
        bias_lane, bias_row = a["bias_key"], a["bias_query"]
    arguments = {
        "x": f.at(at[x], f.mul(first, a[f"{x}_row"])),
        "y": f.at(at[y], f.mul(first, a[f"{y}_row"])),
        "r": at[r],
        "s": at[s],
        "bias": f.at(at["bias"], f.mul(first, bias_lane)),
        "bias_lane": bias_lane,
        "bias_row": bias_row,
        "to": f.at(at[to], f.mul(first, at[f"{to}_row"])),
        "to_row": at[f"{to}_row"],
        "other": f.at(at[other], f.mul(first, at[f"{other}_row"])),
        "other_row": at[f"{other}_row"],
        "scale": f.from_bits(f.op(f"arith.trunci {a['scale'].name} : i64 to i32", "i32", 1)),
        "causal": causal,
        "has_bias": f.compare("ne", a["has_bias"], zero),
        **{f"{n}_row": a[f"{t}_row"] for n, t in zip("xyrs", (x, y, r, s), strict=True)},
        **{n: at[n] for n in ("logs", "delta", "scratch")},
        **{n: a[n] for n in ("depth", "columns")},
        "first": first,
        "count": count,
        "start": start,
        "rows": rows,
    }
    with f.when(f.compare("sle", count, f.number(f.lanes))):
        f.run(units[0], **arguments)
        f.branch()
        f.run(units[-1], **arguments)

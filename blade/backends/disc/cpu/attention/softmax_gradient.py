# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention's softmax over a block of scores ``p[row][lane]`` and gradients ``d[row][lane]``.

``walks`` names the rows: "keys", with queries in the lanes, or "queries", with keys in the lanes.
"""

import math

from blade.backends.disc.cpu.attention import softmax
from blade.backends.disc.cpu.attention.block import Part
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.target.cpu import CpuTarget


def softmax_gradient(target: CpuTarget, vectors: int, walks: str) -> MlirFunction:
    """``p = exp(p - logs); d = p * (d - delta)``; ``logs`` and ``delta`` belong to queries.

    A query without keys has the logarithm -inf and no weights.
    """
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_slopes_{walks}_{vectors}",
        "p:ptr d:ptr rows:i64 count:i64 logs:ptr delta:ptr",
        lanes,
    )
    by_lane: dict[str, list[SsaValue]] = {}
    if walks == "keys":
        masks = [f.first_lanes(f.sub(f["count"], f.number(v * lanes))) for v in range(vectors)]
        for name in ("logs", "delta"):
            by_lane[name] = [
                f.load_masked(f.at(f[name], v * lanes), mask) for v, mask in enumerate(masks)
            ]
        by_lane["logs"] = [_or_all(f, x) for x in by_lane["logs"]]
    with f.loop(f.number(0), f["rows"], 1) as row:
        if walks == "keys":
            logs, delta = by_lane["logs"], by_lane["delta"]
        else:
            log = _or_all(f, f.load(f.at(f["logs"], row)))
            logs = [f.broadcast(log, lanes)] * vectors
            delta = [f.broadcast(f.load(f.at(f["delta"], row)), lanes)] * vectors
        start = f.mul(row, f.number(width))
        for v in range(vectors):
            p, d = (f.at(f.at(f[name], start), v * lanes) for name in ("p", "d"))
            weight = softmax.exp_below_zero(f, f.sub(f.load(p, lanes), logs[v]))
            f.store(weight, p)
            f.store(f.mul(weight, f.sub(f.load(d, lanes), delta[v])), d)
    return f


def _or_all(f: MlirFunction, logs: SsaValue) -> SsaValue:
    """``logs`` with inf in place of -inf, so that exp(p - logs) is 0."""
    never, all_ = (f.like(x, logs) for x in (-math.inf, math.inf))
    return f.select(f.compare("oeq", logs, never), all_, logs)


def add_bias_and_mask(
    f: MlirFunction,
    target: CpuTarget,
    vectors: int,
    walks: str,
    part: Part,
    p: SsaValue,
    row: SsaValue,
    rows: SsaValue,
) -> None:
    """Add bias and mask to the block of scores that starts at ``row``, in a unit of gradient.py."""
    with f.when(f["has_bias"]):
        bias = f.at(f["bias"], f.mul(row, f["bias_row"]))
        same = {"p": p, "keys": rows, "bias": bias, "distance": f["bias_row"]}
        none = f.constant(float("nan"), "f32")
        with f.when(f.compare("eq", f["bias_lane"], f.number(0))):
            f.run(part(softmax.add_key_bias(target, vectors)), **same, fill=none)
            f.branch()
            with f.when(f.compare("eq", f["bias_lane"], f.number(1))):
                f.run(part(_add_rows(target, vectors)), **same, count=f["count"])
                f.branch()
                full = part(softmax.add_bias(target, vectors))
                lane = {"count": f["count"], "query_distance": f["bias_lane"]}
                f.run(full, **same, **lane, fill=none)
    with f.when(f["causal"]):
        if walks == "keys":
            future = part(softmax.mask_future(target, vectors))
            f.run(future, p=p, keys=rows, first=f.sub(f["first"], row))
        else:
            past = part(_mask_past(target, vectors))
            f.run(past, p=p, rows=rows, first=f.sub(row, f["first"]))


def _add_rows(target: CpuTarget, vectors: int) -> MlirFunction:
    """``p[row][lane] += bias[row, lane]``; the bias is contiguous along the lanes."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(
        f"attention_f32_bias_rows_{vectors}",
        "p:ptr keys:i64 bias:ptr distance:i64 count:i64",
        lanes,
    )
    masks = [f.first_lanes(f.sub(f["count"], f.number(v * lanes))) for v in range(vectors)]
    with f.loop(f.number(0), f["keys"], 1) as row:
        bias = f.at(f["bias"], f.mul(row, f["distance"]))
        start = f.at(f["p"], f.mul(row, f.number(width)))
        for v, mask in enumerate(masks):
            at = f.at(start, v * lanes)
            more = f.load_masked(f.at(bias, v * lanes), mask)
            f.store(f.add(f.load(at, lanes), more), at)
    return f


def _mask_past(target: CpuTarget, vectors: int) -> MlirFunction:
    """Causal mask: the query of row i sees the lanes' keys up to ``first + i``; the others become -inf."""
    lanes, width = target.lanes, vectors * target.lanes
    f = MlirFunction(f"attention_f32_past_{vectors}", "p:ptr rows:i64 first:i64", lanes)
    never = f.constant(-math.inf, "f32", lanes)
    # rows from `some` on see all lanes
    some = f.most(f.sub(f.number(width - 1), f["first"]), f.number(0))
    with f.loop(f.number(0), f.least(f["rows"], some), 1) as row:
        last = f.op(f"arith.trunci {f.add(f['first'], row).name} : i64 to i32", "i32", 1)
        last = f.broadcast(last, lanes)
        start = f.at(f["p"], f.mul(row, f.number(width)))
        for v in range(vectors):
            key = f.add(f.iota("i32", lanes), f.constant(v * lanes, "i32", lanes))
            at = f.at(start, v * lanes)
            f.store(f.select(f.compare("sle", key, last), f.load(at, lanes), never), at)
    return f

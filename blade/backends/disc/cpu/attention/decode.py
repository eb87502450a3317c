# SPDX-License-Identifier: Apache-2.0
"""Attention for few queries (decoding with a cache): one query at a time, with its row of scores in scratch.

Reading keys and values once bounds the speed. Lanes run along a key (dot products) and along a value.
"""

from blade.backends.disc.cpu.attention.softmax import biased, capped, exp_below_zero
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import MlirFunction
from blade.backends.disc.target.cpu import CpuTarget

_KEYS = 4  # dot products computed together


def decode_scores(target: CpuTarget) -> MlirFunction:
    """``p[s] = scale * dot(q, k[s]) + bias[s]`` for every key, or the bias alone (see ``biased``)."""
    f = MlirFunction(
        "attention_f32_dots",
        "q:ptr scale:f32 k:ptr distance:i64 keys:i64 depth:i64 bias:ptr bias_distance:i64 "
        "fill:f32 p:ptr",
        target.lanes,
    )
    whole = f.floor_to(f["keys"], _KEYS)
    for low, high, count in ((f.number(0), whole, _KEYS), (whole, f["keys"], 1)):
        with f.loop(low, high, count) as s:
            for r, total in enumerate(_decode_scores(f, s, count)):
                at = f.add(s, f.number(r)) if r else s
                bias = f.load(f.at(f["bias"], f.mul(at, f["bias_distance"])))
                score = biased(f, f.mul(total, f["scale"]), bias)
                f.store(score, f.at(f["p"], at))
    return f


def score_row(
    f: MlirFunction,
    made: tuple[MlirFunction, MlirFunction],
    biases: tuple[SsaValue, SsaValue],
    p: SsaValue,
    keys: SsaValue,
    **given: SsaValue,
) -> None:
    """The scores ``p`` of one query, in a unit: by ``made``, dot products with the bias, or then a cap and the bias.

    ``biases``: of this query, if there is one, and a 0 that stands for none.
    """
    dots, cap = made
    bias, nothing = f.either(f["has_bias"], biases[0], biases[1]), biases[1]
    at_once = f.apply("arith.xori", f["has_cap"], f.constant(1, "i1"))
    step = f.select(f["has_bias"], f["bias_key"], f.number(0))
    f.run(
        dots,
        **given,
        p=p,
        keys=keys,
        bias=f.either(at_once, bias, nothing),
        bias_distance=f.select(at_once, step, f.number(0)),
        fill=f["fill"],
    )
    with f.when(f["has_cap"]):
        same = {n: f[n] for n in ("cap", "fill")}
        f.run(cap, p=p, keys=keys, bias=bias, bias_distance=step, **same)


def cap_row(target: CpuTarget) -> MlirFunction:
    """``p[s] = cap * tanh(p[s] / cap)``, and then the bias, over a row that is padded by one vector."""
    f = MlirFunction(
        "attention_f32_cap_row",
        "p:ptr keys:i64 cap:f32 bias:ptr bias_distance:i64 fill:f32",
        target.lanes,
    )
    with f.loop(f.number(0), f["keys"], target.lanes) as s:
        at = f.at(f["p"], s)
        f.store(capped(f, f.load(at, target.lanes)), at)
    with f.loop(f.number(0), f["keys"], 1) as s:
        at = f.at(f["p"], s)
        bias = f.load(f.at(f["bias"], f.mul(s, f["bias_distance"])))
        f.store(biased(f, f.load(at), bias), at)
    return f


def _decode_scores(f: MlirFunction, s: SsaValue, count: int) -> list[SsaValue]:
    lanes = f.lanes
    keys = [
        f.at(f["k"], f.mul(f.add(s, f.number(r)) if r else s, f["distance"])) for r in range(count)
    ]
    whole = f.floor_to(f["depth"], lanes)
    zeros = [f.constant(0.0, "f32", lanes)] * count
    with f.carrying(f.number(0), whole, lanes, zeros) as carry:
        q = f.load(f.at(f["q"], carry.index), lanes)
        carry.next(
            [
                f.fma(q, f.load(f.at(key, carry.index), lanes), total)
                for key, total in zip(keys, carry.values, strict=True)
            ]
        )
    with f.carrying(whole, f["depth"], lanes, carry.results) as rest:  # one round, or none
        mask = f.first_lanes(f.sub(f["depth"], rest.index))
        q = f.load_masked(f.at(f["q"], rest.index), mask)
        rest.next(
            [
                f.fma(q, f.load_masked(f.at(key, rest.index), mask), total)
                for key, total in zip(keys, rest.values, strict=True)
            ]
        )
    return [across(f, "add", total) for total in rest.results]


def across(f: MlirFunction, kind: str, x: SsaValue) -> SsaValue:
    """Reduce all lanes to a scalar, as a tree."""
    while x.lanes > 1:
        low, high = f.half(x, high=False), f.half(x, high=True)
        if kind == "add":
            x = f.add(low, high)
        else:
            x = f.select(f.compare("ogt", low, high), low, high)
    return x


def row_exponentials(target: CpuTarget) -> MlirFunction:
    """``p = exp(p - max(p))`` and ``factor = 1 / sum(p)`` over a row, padded by one vector, and the sink."""
    lanes = target.lanes
    arguments = "p:ptr keys:i64 sink:f32 empty:f32 factor:ptr"
    f = MlirFunction("attention_f32_row_softmax", arguments, lanes)
    never, zeros = (f.constant(x, "f32", lanes) for x in (-float("inf"), 0.0))
    zero = f.number(0)
    f.store(never, f.at(f["p"], f["keys"]))
    with f.carrying(zero, f["keys"], lanes, [never]) as tops:
        x = f.load(f.at(f["p"], tops.index), lanes)
        tops.next([f.select(f.compare("ogt", x, tops.values[0]), x, tops.values[0])])
    top = across(f, "max", tops.results[0])
    top = f.broadcast(f.select(f.compare("ogt", f["sink"], top), f["sink"], top), lanes)
    shift = f.select(f.compare("oeq", top, never), zeros, top)
    with f.carrying(zero, f["keys"], lanes, [zeros]) as sums:
        at = f.at(f["p"], sums.index)
        y = exp_below_zero(f, f.sub(f.load(at, lanes), shift))
        f.store(y, at)
        sums.next([f.add(sums.values[0], y)])
    own = exp_below_zero(f, f.sub(f.broadcast(f["sink"], lanes), shift))
    total = f.add(across(f, "add", sums.results[0]), f.lane(own, 0))
    nothing = f.compare("oeq", total, f.constant(0.0, "f32"))
    inverse = f.div(f.constant(1.0, "f32"), total)
    f.store(f.select(nothing, f["empty"], inverse), f["factor"])
    return f

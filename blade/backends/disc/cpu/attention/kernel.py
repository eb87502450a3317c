# SPDX-License-Identifier: Apache-2.0
"""The generated attention: ``softmax(scale * Q K^T + bias) V`` per head, every size an argument.

Operands are float32, or bfloat16 with a float32 bias; scores, softmax and sums are float32.

    attention(ptrs = Q, K, V, bias, sink, O, scratch; ints = ARGUMENTS), units = heads x blocks of queries

A unit is one head's block of queries. Its scores against up to ``BLOCK_KEYS`` keys stay in scratch (L1 or
L2); their exponentials times V are summed in registers. More keys are walked block by block with a
running maximum and sum. With few queries (decoding), each query is computed alone. Tensors are read in
place, by strides. If a head has several units and many keys, its keys and values are first copied into
adjacent rows, because rows a whole projection apart map to few cache sets.
"""

import functools

from blade.backends.disc.cpu.attention import decode as few
from blade.backends.disc.cpu.attention import tiles
from blade.backends.disc.cpu.attention.bf16_block import bf16_block_unit, bf16_few
from blade.backends.disc.cpu.attention.block import (
    BLOCK_KEYS,
    UNIT,
    Part,
    block_unit,
    values_product,
)
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import ENTRY, MlirFunction
from blade.backends.disc.target.cpu import CpuTarget

NAME = "attention_f32"
NAME_WITH_LOGS = "attention_f32_logs"
LEAD = 4  # axes before the queries' axis; missing ones have size 1
FEW = 3  # up to so many queries are computed one by one
PACKED_KEYS = (256, 4096)  # numbers of keys for which a head's keys and values are copied

_TENSORS = ("q", "k", "v", "bias", "sink", "o")
ARGUMENTS = (
    *(f"n{k}" for k in range(LEAD)),
    *("queries", "keys", "depth", "columns", "causal", "undefined"),
    *("scale", "cap", "has_bias", "fill", "has_sink"),
    *(f"{t}_{k}" for t in _TENSORS for k in range(LEAD)),
    *("q_row", "k_row", "v_row", "o_row", "bias_query", "bias_key"),
)
"""Sizes, flags, bits of floats, strides in elements. ``undefined``: a row without keys is NaN, not 0. ``cap``: 0, or
scores become cap * tanh(score / cap). ``fill``: a bias that is this number replaces the score; NaN: none does."""
LOGS_AT = "logs_at"
"""Additional argument of ``NAME_WITH_LOGS``: the offset from O to log(sum(exp(scores))) of every query."""


def block_queries(target: CpuTarget) -> int:
    """Queries per unit."""
    return tiles.VECTORS * target.lanes


@functools.lru_cache(maxsize=4)
def attention_text(target: CpuTarget, logs: bool = False) -> str:
    """MLIR of ``attention_f32`` (``attention_f32_logs``) and all functions that it calls."""
    parts: dict[str, MlirFunction] = {}

    def part(f: MlirFunction) -> MlirFunction:
        return parts.setdefault(f.name, f)

    multiply = part(values_product(target, part))
    widths = range(1, tiles.VECTORS + 1)
    units = {v: part(block_unit(target, v, multiply, part, logs)) for v in widths}
    small = None if logs else part(_decode(target, multiply, part))
    copy = part(tiles.copy_rows(target))
    text = [f.text() for f in parts.values()]
    return "\n".join([*text, _entry(target, units, small, copy).text(internal=False)]) + "\n"


def bf16_name(result: str) -> str:
    return f"attention_bf16_{result}"


@functools.lru_cache(maxsize=4)
def bf16_text(target: CpuTarget, result: str) -> str:
    """MLIR of ``attention_bf16_RESULT``: Q, K and V are bfloat16, O has elements ``result``."""
    parts: dict[str, MlirFunction] = {}

    def part(f: MlirFunction) -> MlirFunction:
        return parts.setdefault(f.name, f)

    widths = range(1, tiles.VECTORS + 1)
    units = {v: part(bf16_block_unit(target, v, result, part)) for v in widths}
    small = part(bf16_few(target, result, part))
    text = [f.text() for f in parts.values()]
    return (
        "\n".join([*text, _entry(target, units, small, None, result).text(internal=False)]) + "\n"
    )


def _decode(target: CpuTarget, multiply: MlirFunction, part: Part) -> MlirFunction:
    """One unit, query by query."""
    lanes = target.lanes
    f = MlirFunction("attention_f32_few", UNIT, lanes)
    dots, exponentials = part(few.decode_scores(target)), part(few.row_exponentials(target))
    nothing, factor, p = f["scratch"], f.at(f["scratch"], 1), f.at(f["scratch"], 16)
    f.store(f.constant(0.0, "f32"), nothing)
    cap_row = part(few.cap_row(target))
    with f.loop(f.number(0), f["count"], 1) as r:
        seen = f.least(f["keys"], f.add(f.add(f["first"], r), f.number(1)))
        keys = f.select(f["causal"], seen, f["keys"])
        bias = f.at(f["bias"], f.mul(r, f["bias_query"]))
        q, o = f.at(f["q"], f.mul(r, f["q_row"])), f.at(f["o"], f.mul(r, f["o_row"]))
        few.score_row(
            f,
            (dots, cap_row),
            (bias, nothing),
            p=p,
            keys=keys,
            q=q,
            scale=f["scale"],
            k=f["k"],
            distance=f["k_row"],
            depth=f["depth"],
        )
        f.run(exponentials, p=p, keys=keys, sink=f["sink"], empty=f["empty"], factor=factor)
        f.run(
            multiply,
            p=p,
            p_distance=f.number(1),
            v=f["v"],
            distance=f["v_row"],
            depth=keys,
            fresh=f.constant(1, "i1"),
            sums=o,  # read, but not added
            sums_distance=f.number(0),
            factors=factor,
            to=o,
            to_distance=f["o_row"],
            rows=f.number(1),
            columns=f["columns"],
        )
    return f


def _entry(
    target: CpuTarget,
    units: dict[int, MlirFunction],
    small: MlirFunction | None,
    copy: MlirFunction | None,
    result: str = "",
) -> MlirFunction:
    """The loop over units: a unit's head, its queries, and the function that computes them.

    ``small`` computes few queries. Without it, the units also write logarithms. Without ``copy``, Q, K and V are
    bfloat16, and keys and values are read in place.
    """
    names = ARGUMENTS if small is not None else (*ARGUMENTS, LOGS_AT)
    name = NAME_WITH_LOGS if small is None else NAME if copy is not None else bf16_name(result)
    elements = dict.fromkeys(_TENSORS, "f32")
    if copy is None:
        elements |= {"q": "i16", "k": "i16", "v": "i16", "o": result}
    f = MlirFunction(name, ENTRY, target.lanes)
    pointers = {n: f.load(f.at(f["ptrs"], k, "ptr"), 1, "ptr") for k, n in enumerate(_TENSORS)}
    scratch = f.load(f.at(f["ptrs"], len(_TENSORS), "ptr"), 1, "ptr")
    a = {n: f.load(f.at(f["ints"], k, "i64"), 1, "i64") for k, n in enumerate(names)}
    zero, one, size = f.number(0), f.number(1), block_queries(target)
    scale, cap, fill = (_float(f, a[n]) for n in ("scale", "cap", "fill"))
    causal, has_bias = (f.compare("ne", a[n], zero) for n in ("causal", "has_bias"))
    undefined = f.apply(
        "arith.andi", f.compare("ne", a["undefined"], zero), f.compare("ne", a["keys"], zero)
    )
    empty = f.select(undefined, f.constant(float("nan"), "f32"), f.constant(0.0, "f32"))
    has_sink, never = f.compare("ne", a["has_sink"], zero), f.constant(-float("inf"), "f32")
    blocks = f.most(f.above(a["queries"], size), one)
    with f.loop(f["begin"], f["end"], 1) as unit:
        head = f.apply("arith.divui", unit, blocks)
        at = _heads(f, pointers, a, head, elements)
        first = f.mul(f.apply("arith.remui", unit, blocks), f.number(size))
        rows = {n: a[n] for n in ("k_row", "v_row")}
        if copy is not None:
            is_fresh = f.compare("eq", f.mul(first, f.sub(unit, f["begin"])), zero)
            packed = f.at(scratch, _block_room(f, target, a))
            copied = _copied(f, copy, a, at, is_fresh, packed)
            at, rows = {**at, **copied}, {n: copied[n] for n in rows}
        count = f.least(f.sub(a["queries"], first), f.number(size))
        seen = f.least(a["keys"], f.add(first, count))
        same_names = "depth columns q_row o_row bias_query bias_key".split()
        arguments = {n: a[n] for n in same_names} | {
            "q": f.at(at["q"], f.mul(first, a["q_row"]), elements["q"]),
            "k": at["k"],
            "v": at["v"],
            **rows,
            "o": f.at(at["o"], f.mul(first, a["o_row"]), elements["o"]),
            "bias": f.at(at["bias"], f.mul(first, a["bias_query"])),
            "scratch": scratch,
            "first": first,
            "count": count,
            "keys": f.select(causal, seen, a["keys"]),
            "all_keys": a["keys"],
            "causal": causal,
            "empty": empty,
            "sink": f.select(has_sink, f.load(f.either(has_sink, at["sink"], scratch)), never),
            "scale": scale,
            "cap": cap,
            "has_cap": f.compare("ogt", cap, f.constant(0.0, "f32")),
            "fill": fill,
            "has_bias": has_bias,
        }
        if small is None:
            place = f.add(f.mul(head, a["queries"]), first)
            arguments["logs"] = f.at(f.at(pointers["o"], a[LOGS_AT]), place)
            _by_width(f, units, arguments)
        else:
            with f.when(f.compare("sle", a["queries"], f.number(FEW))):
                f.run(small, **arguments)
                f.branch()
                _by_width(f, units, arguments)
    return f


def _float(f: MlirFunction, bits: SsaValue) -> SsaValue:
    return f.from_bits(f.op(f"arith.trunci {bits.name} : i64 to i32", "i32", 1))


def _copied(
    f: MlirFunction,
    copy: MlirFunction,
    a: dict[str, SsaValue],
    at: dict[str, SsaValue],
    is_fresh: SsaValue,
    packed: SsaValue,
) -> dict[str, SsaValue]:
    """Keys and values of a head in adjacent rows, if it has several units and many keys; else as they are."""
    some, many = f.number(PACKED_KEYS[0]), f.number(PACKED_KEYS[1])
    in_range = f.apply(
        "arith.andi", f.compare("sge", a["keys"], some), f.compare("sle", a["keys"], many)
    )
    has_several = f.compare("sgt", a["queries"], f.number(tiles.VECTORS * f.lanes))
    packs = f.apply("arith.andi", in_range, has_several)
    packed_values = f.at(packed, f.mul(a["keys"], a["depth"]))
    with f.when(f.apply("arith.andi", packs, is_fresh)):
        same = {"rows": a["keys"]}
        k, v = {"x": at["k"], "distance": a["k_row"]}, {"x": at["v"], "distance": a["v_row"]}
        f.run(copy, **k, **same, columns=a["depth"], to=packed)
        f.run(copy, **v, **same, columns=a["columns"], to=packed_values)
    return {
        "k": f.either(packs, packed, at["k"]),
        "v": f.either(packs, packed_values, at["v"]),
        "k_row": f.select(packs, a["depth"], a["k_row"]),
        "v_row": f.select(packs, a["columns"], a["v_row"]),
    }


def _by_width(
    f: MlirFunction, units: dict[int, MlirFunction], arguments: dict[str, SsaValue]
) -> None:
    with f.when(f.compare("sle", arguments["count"], f.number(f.lanes))):
        f.run(units[1], **arguments)
        f.branch()
        f.run(units[2], **arguments)


def _block_room(f: MlirFunction, target: CpuTarget, a: dict[str, SsaValue]) -> SsaValue:
    """Floats of scratch per unit (``block_unit`` lays them out)."""
    rows = f.least(a["keys"], f.number(BLOCK_KEYS))
    padded = f.mul(f.above(a["columns"], target.lanes), f.number(target.lanes))
    extra = tiles.key_rows(target)[0] + 4
    total = f.add(f.add(rows, a["depth"]), f.add(padded, f.number(extra)))
    return f.mul(total, f.number(block_queries(target)))


def _heads(
    f: MlirFunction,
    pointers: dict[str, SsaValue],
    a: dict[str, SsaValue],
    head: SsaValue,
    elements: dict[str, str],
) -> dict[str, SsaValue]:
    """The addresses of all tensors for one index over all leading axes."""
    index = [head] * LEAD
    for k in reversed(range(1, LEAD)):
        size = f.most(a[f"n{k}"], f.number(1))
        index[k] = f.apply("arith.remui", head, size)
        head = f.apply("arith.divui", head, size)
    index[0] = head
    found = {}
    for name, pointer in pointers.items():
        for k in range(LEAD):
            pointer = f.at(pointer, f.mul(index[k], a[f"{name}_{k}"]), elements[name])
        found[name] = pointer
    return found

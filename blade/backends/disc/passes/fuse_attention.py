# SPDX-License-Identifier: Apache-2.0
"""Fuses attention written out as two products and a softmax into one ``attention``: scores stay in cache.

    %s = matmul %q %kT          %m = add (mul %s 0.125) %mask
    %p = div (exp (sub %m (max %m))) (sum ...)             ->      %y = attention %q %k %v %mask
    %y = matmul %p %v

Between the product and the softmax the scores may be scaled by numbers and by tensors that are equal for all keys,
capped (``c * tanh(scores)``), added to biases, filled under a condition (``masked_fill``), converted to another float
dtype, and reshaped in their leading axes (windows, heads). One more key may have a score and no value (a sink, as of
GPT-OSS). Nothing else may read the scores. Of a row whose scores are all -inf, the softmax is NaN or, by
``_safe_softmax``, 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from blade.backends.disc.ir.attention import attend, repeats, why_not, widened
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    live,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities

_LAYOUT = ("reshape", "permute", "slice")
_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_MASKED = -1e4  # a bias of at most this number is a mask


@dataclass(frozen=True)
class _Scores:
    """``scale * product`` plus ``biases`` (value, negated?), replaced by ``fill`` unless ``where`` is
    ``kept``. Before that, a ``cap`` that is not 0 makes ``cap * tanh(scores / cap)`` of the scores.
    ``factors``: what queries are multiplied by.
    """

    product: Value
    scale: float
    cap: float = 0.0
    factors: tuple[Value, ...] = ()
    biases: tuple[tuple[Value, bool], ...] = ()
    where: Value | None = None
    fill: float = 0.0
    kept: bool = True
    filled: torch.dtype = torch.float32  # of what is filled
    sink: Value | None = None
    undefined: bool = True  # whether the softmax of -inf alone is NaN, and not 0

    @property
    def is_bare(self) -> bool:
        """Whether nothing was added or filled yet."""
        return not self.biases and self.where is None


def find_attention(graph: Graph, forms: TargetCapabilities = CPU) -> Graph:
    """``graph`` with every written-out attention replaced by one ``attention``."""
    values = live(graph)
    readers: dict[int, set[int]] = {v.id: set() for v in values}
    for v in values:
        for arg in v.args:
            readers[arg.id].add(v.id)
    for v in graph.outputs:
        readers[v.id].add(-1)
    b = IrBuilder(RULES)
    new: dict[int, Value] = {}
    for v in values:
        found = _match(v, readers) if v.op == "matmul" else None
        heads = 0 if -1 in readers[v.id] else 1  # an output keeps the product's strides
        made = None if found is None else _build(b, v, found, new, heads, forms)
        if made is None:
            args = [new[a.id] for a in v.args]
            made = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        new[v.id] = made
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    rebuilt = replace(graph, values=b.values, outputs=outs, inputs=ins)
    rebuilt.values = live(rebuilt)
    return rebuilt


def _match(v: Value, readers: dict[int, set[int]]) -> _Scores | None:
    """The scores whose softmax the product ``v`` reads; ``None`` if there is none or it has other readers."""
    inside: set[int] = {v.id}
    weights = _regrouped(v.args[0], inside)
    safe, sink = _safe_softmax_of(weights, inside), None
    logits = _softmax_of(weights, inside) if safe is None else safe
    if logits is None and weights.op == "slice":
        logits, sink = _softmax_with_sink(weights, inside)
    if logits is None:
        return None
    scores = _scores(logits, inside)
    if scores is None:
        return None
    scores = replace(scores, undefined=safe is None, sink=sink)
    inside.add(scores.product.id)
    hidden = inside - {v.id}
    return scores if all(readers[k] <= inside for k in hidden) else None


def _regrouped(v: Value, inside: set[int]) -> Value:
    """The operand of conversions and of reshapes that divide the leading axes differently."""
    while _is_same_number(v) or (v.op == "reshape" and v.args[0].shape[-2:] == v.shape[-2:]):
        inside.add(v.id)
        v = v.args[0]
    return v


def _is_same_number(v: Value) -> bool:
    """Whether ``v`` converts floats to floats."""
    return v.op == "cast" and {v.dtype, v.args[0].dtype} <= _FLOATS


def _safe_softmax_of(v: Value, inside: set[int]) -> Value | None:
    """x if ``v`` is softmax x, or 0 in rows of x that are all -inf."""
    if v.op != "where" or not _is_number(v.args[1], 0.0):
        return None
    condition, _, softmax = v.args
    found = {v.id}
    logits = _softmax_of(softmax, found)
    condition = _unspread(condition, found)
    if logits is None or condition.op != "eq" or not _is_number(condition.args[1], -math.inf):
        return None
    found.add(condition.id)
    if not _is_reduced(condition.args[0], "max", logits, found):
        return None
    inside |= found
    return logits


def _softmax_with_sink(v: Value, inside: set[int]) -> tuple[Value | None, Value | None]:
    """x and y if the slice ``v`` is the softmax of x and one more key, with the score y, without this key.

    The maximum may be subtracted before.
    """
    found = {v.id}
    logits = _softmax_of(_regrouped(v.args[0], found), found)
    if logits is None:
        return None, None
    logits = _regrouped(logits, found)
    if logits.op == "sub" and _is_reduced(logits.args[1], "max", logits.args[0], found):
        found.add(logits.id)
        logits = _regrouped(logits.args[0], found)
    if logits.op != "concat" or len(logits.args) != 2:
        return None, None
    scores, sink = logits.args
    is_first = v.shape == scores.shape and not any(v.attrs["starts"])
    if not (is_first and sink.shape[-1] == 1 and _is_equal_for(sink, len(sink.shape) - 2)):
        return None, None
    inside |= {*found, logits.id}
    return scores, sink


def _is_number(v: Value, number: float) -> bool:
    return v.op == "fill" and float(v.attrs["value"]) == number


def _softmax_of(v: Value, inside: set[int]) -> Value | None:
    """x if ``v`` is exp(x - max x) / sum exp(x - max x) along the last axis."""
    if v.op != "div" or v.args[0].op != "exp" or v.args[0].args[0].op != "sub":
        return None
    exps, shifted = v.args[0], v.args[0].args[0]
    found = {v.id, exps.id, shifted.id}
    logits = shifted.args[0]
    for part, kind, of in ((v.args[1], "sum", exps), (shifted.args[1], "max", logits)):
        if not _is_reduced(part, kind, of, found):
            return None
    inside |= found
    return logits


def _is_reduced(v: Value, kind: str, of: Value, inside: set[int]) -> bool:
    """Whether ``v`` is the reduction of ``of`` along its last axis, repeated along it or not."""
    v = _unspread(v, inside)
    inside.add(v.id)
    if v.op != "reduce" or v.args[0] is not of or v.attrs["kind"] != kind:
        return False
    return bool(v.attrs["axes"] == (len(of.shape) - 1,))


def _unspread(v: Value, inside: set[int]) -> Value:
    while v.op in ("broadcast", "reshape"):
        inside.add(v.id)
        v = v.args[0]
    return v


def _scores(v: Value, inside: set[int]) -> _Scores | None:
    """``v`` as a product of two matrices under scales, biases and a fill, matched from the outside in."""
    if v.op == "matmul":
        return _Scores(v, 1.0)
    step = _STEPS.get(v.op)
    found = None if step is None else step(v, inside)
    if found is not None:
        inside.add(v.id)
    return found


def _reshape(v: Value, inside: set[int]) -> _Scores | None:
    return _scores(v.args[0], inside) if v.args[0].shape[-2:] == v.shape[-2:] else None


def _converted(v: Value, inside: set[int]) -> _Scores | None:
    return _scores(v.args[0], inside) if _is_same_number(v) else None


def _scaled(v: Value, inside: set[int]) -> _Scores | None:
    for x, y in (v.args, v.args[::-1]):
        if y.op == "fill" and not (v.op == "div" and y is v.args[0]):
            found = _scores(x, inside)
            number = float(y.attrs["value"])
            if found is None or not found.is_bare or number == 0:
                return None
            factor = 1 / number if v.op == "div" else number
            scale, cap = found.scale * factor, abs(found.cap * factor)  # tanh is odd
            is_finite = math.isfinite(scale) and math.isfinite(cap)
            return replace(found, scale=scale, cap=cap) if is_finite else None
    return _multiplied(v, inside) if v.op == "mul" else None


def _multiplied(v: Value, inside: set[int]) -> _Scores | None:
    """Scores times a tensor that is the same for all keys, such as a scale of each head."""
    for x, y in (v.args, v.args[::-1]):
        found = _scores(x, inside) if _is_equal_for(y, len(y.shape) - 1) else None
        if found is not None:
            is_first = found.is_bare and not found.cap
            return replace(found, factors=(*found.factors, y)) if is_first else None
    return None


def _is_equal_for(v: Value, axis: int) -> bool:
    """Whether ``v`` is broadcast along ``axis``."""
    return v.op == "broadcast" and axis not in v.attrs["axes"]


def _capped(v: Value, inside: set[int]) -> _Scores | None:
    found = _scores(v.args[0], inside)
    is_first = found is not None and found.is_bare and not found.cap
    return replace(found, cap=1.0) if found is not None and is_first else None


def _added(v: Value, inside: set[int]) -> _Scores | None:
    sides = (v.args, v.args[::-1]) if v.op == "add" else (v.args,)
    for x, y in sides:
        found = _scores(x, inside)
        if found is not None:
            return _biased(found, y, v.op == "sub")
    return None


def _fused(v: Value, inside: set[int]) -> _Scores | None:
    """bias * number + scores, as baddbmm writes it, or scores * number + bias."""
    x, number, y = v.args
    if number.op != "fill":
        return None
    found = _scores(y, inside)
    if found is not None and float(number.attrs["value"]) == 1:
        return _biased(found, x, False)
    return None


def _biased(found: _Scores, bias: Value, negated: bool) -> _Scores | None:
    if found.where is not None:
        return None
    return replace(found, biases=(*found.biases, (bias, negated)))


def _filled(v: Value, inside: set[int]) -> _Scores | None:
    condition, yes, no = v.args
    for x, y, kept in ((yes, no, True), (no, yes, False)):
        if y.op == "fill" and not math.isnan(y.attrs["value"]):
            found = _scores(x, inside)
            number = float(y.attrs["value"])
            if found is None or found.where is not None or number == 0:
                return None  # a bias of 0 keeps the scores
            if found.biases and number > _MASKED:
                return None  # the bias may be that number elsewhere
            return replace(found, where=condition, fill=number, kept=kept, filled=v.dtype)
    return None


_STEPS: dict[str, Callable[[Value, set[int]], _Scores | None]] = {
    "reshape": _reshape,
    "cast": _converted,
    "tanh": _capped,
    "mul": _scaled,
    "div": _scaled,
    "add": _added,
    "sub": _added,
    "fma": _fused,
    "where": _filled,
}


def _build(
    b: IrBuilder,
    v: Value,
    scores: _Scores,
    new: dict[int, Value],
    heads: int,
    forms: TargetCapabilities,
) -> Value | None:
    """The attention that replaces the product ``v``."""
    q, kt = (new[a.id] for a in scores.product.args)
    k = _transposed(b, kt)
    value = new[v.args[1].id]
    q, before = _without_scale(b, q)
    k, behind = _without_scale(b, k)
    given = [new[x.id] for x, _ in scores.biases]
    condition = None if scores.where is None else new[scores.where.id]
    sink = None if scores.sink is None else new[scores.sink.id]
    if sink is not None:
        is_read = sink.dtype in (q.dtype, torch.float32)  # what kernels take for a bias, too
        if not (is_read and _is_equal_for(sink, len(sink.shape) - 2)):
            return None
    factors = [new[x.id] for x in scores.factors]
    if not all(_is_equal_for(x, len(x.shape) - 1) for x in factors):
        return None
    masks = [x for x in (*given, *factors, condition, sink) if x is not None]
    lead = _finest([*masks, *(_source(x) for x in (q, k, value)), v])
    q, k, value = (b.reshape(x, (*lead, *x.shape[-2:])) for x in (q, k, value))
    for factor in factors:
        one = _narrowed(b, factor, (*factor.shape[:-1], 1), (*lead, q.shape[-2], 1))
        q = b.pointwise("mul", q, b.broadcast(one, q.shape))
    shape = (*lead, q.shape[-2], k.shape[-2])
    bias, fill = _sum_of_biases(b, scores, given, shape), None
    if condition is not None:
        fill = _rounded(scores.fill, scores.filled)
        condition = _seen_as(b, condition, shape)
        bias = b.fill(0.0, shape, scores.filled) if bias is None else bias
        bias = _filled_bias(b, scores, condition, bias, fill)
    if why_not(q, k, value, bias, forms) is not None:
        return None
    made = attend(
        b,
        q,
        k,
        value,
        bias,
        scores.scale * before * behind,
        undefined=scores.undefined,
        heads=heads,
        cap=scores.cap,
        fill=fill,
        sink=None if sink is None else _narrowed(b, sink, (*sink.shape[:-2], 1, 1), (*lead, 1, 1)),
    )
    return b.reshape(made, v.shape)


def _transposed(b: IrBuilder, v: Value) -> Value:
    """``v`` with its last two axes exchanged, before leading axes are merged, which may copy what is transposed."""
    rank = len(v.shape)
    kept = tuple(d for d in v.args[0].shape if d != 1) if v.op == "reshape" else ()
    if len(kept) > 1 and kept[-2:] == v.shape[-2:]:
        core = b.reshape(v.args[0], kept)
        if core.op == "permute":
            inner = _transposed(b, core)
            return b.reshape(inner, (*v.shape[:-2], *inner.shape[-2:]))
    return b.permute(v, (*range(rank - 2), rank - 1, rank - 2))


def _narrowed(b: IrBuilder, v: Value, shape: Shape, divided: Shape) -> Value:
    """The broadcast ``v`` without what repeats at its end, as ``shape``, with the leading axes of ``divided``."""
    one = b.make("broadcast", v.args, shape, v.dtype, **v.attrs)
    return _seen_as(b, one, divided)


def _sum_of_biases(b: IrBuilder, scores: _Scores, given: list[Value], shape: Shape) -> Value | None:
    biases = [
        b.pointwise("neg", x) if negated else x
        for x, (_, negated) in zip(given, scores.biases, strict=True)
    ]
    if len({x.dtype for x in biases}) > 1:
        biases = [widened(b, x) for x in biases]
    bias: Value | None = None
    for x in biases:
        x = _seen_as(b, x, shape)
        bias = x if bias is None else _at_broadcast(b, "add", bias, x)
    return bias


def _filled_bias(
    b: IrBuilder, scores: _Scores, condition: Value, bias: Value, fill: float
) -> Value:
    """``bias``, and ``fill`` where it replaces the scores, in a dtype that has this number."""
    if _rounded(fill, bias.dtype) != fill:
        bias = widened(b, bias)
    other = b.fill(fill, bias.shape, bias.dtype)
    order = (bias, other) if scores.kept else (other, bias)
    return _at_broadcast(b, "where", condition, *order)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _seen_as(b: IrBuilder, v: Value, shape: Shape) -> Value:
    """``v`` with its leading axes divided as in ``shape``; broadcast axes stay broadcast."""
    if v.op == "broadcast" and v.shape != shape:
        pairs = list(zip(reversed(v.shape), reversed(shape), strict=False))
        same = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
        first, shift = len(v.shape) - same, len(shape) - len(v.shape)
        if all(a >= first for a in v.attrs["axes"]):
            axes = tuple(a + shift for a in v.attrs["axes"])
            return b.make("broadcast", v.args, shape, v.dtype, axes=axes)
    return b.reshape(v, shape)


def _source(v: Value) -> Value:
    """The operand of a reshape that only merges leading axes."""
    if v.op == "reshape" and v.args[0].shape[-2:] == v.shape[-2:] and repeats(v) is None:
        return v.args[0]
    return v


def _finest(values: list[Value]) -> Shape:
    """The leading axes of the value that divides them most."""
    return max((v.shape[:-2] for v in values), key=len)


def _without_scale(b: IrBuilder, v: Value) -> tuple[Value, float]:
    """``v`` before its multiplication by a number, and the number; models often scale queries so."""
    if v.op == "mul":
        for x, y in (v.args, v.args[::-1]):
            if y.op == "fill" and math.isfinite(y.attrs["value"]) and y.attrs["value"] != 0:
                return x, float(y.attrs["value"])
    if v.op in _LAYOUT:
        inner, scale = _without_scale(b, v.args[0])
        if scale != 1:
            return b.make(v.op, (inner,), v.shape, v.dtype, **v.attrs), scale
    return v, 1.0


def _at_broadcast(b: IrBuilder, op: str, *values: Value) -> Value:
    """``op`` at the smallest shape that all values broadcast from."""
    shape = values[0].shape
    cores = [_core(b, v) for v in values]
    axes = tuple(sorted({a for _, places in cores for a in places}))
    if len(axes) == len(shape):
        return b.pointwise(op, *values)
    core = tuple(shape[a] for a in axes)
    parts = [
        b.make("broadcast", (v,), core, v.dtype, axes=tuple(axes.index(a) for a in places))
        for v, places in cores
    ]
    made = b.pointwise(op, *parts)
    return b.make("broadcast", (made,), shape, made.dtype, axes=axes)


def _core(b: IrBuilder, v: Value) -> tuple[Value, tuple[int, ...]]:
    """What ``v`` repeats, and its axes in ``v``."""
    if v.op == "broadcast":
        return v.args[0], v.attrs["axes"]
    if v.op == "fill":
        return b.fill(v.attrs["value"], (), v.dtype), ()
    return v, tuple(range(len(v.shape)))

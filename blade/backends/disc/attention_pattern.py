# SPDX-License-Identifier: Apache-2.0
"""Attention written out becomes one ``attention``: the scores never leave the cache.

    %s = matmul %q %kT          %m = add (mul %s 0.125) %mask
    %p = div (exp (sub %m (max %m))) (sum ...)             ->      %y = attention %q %k %v %mask
    %y = matmul %p %v

Between the product and the softmax the scores may be scaled by numbers, have biases added, be filled where a
condition says so (``masked_fill``), and be seen with their leading axes divided in other ways (windows, heads).
Nothing else may read them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from blade.backends.disc.attention import attend, repeats, why_not
from blade.backends.disc.forms import CPU, Forms
from blade.backends.disc.ir import Builder, Graph, Shape, Value, live
from blade.backends.disc.simplify import RULES

_LAYOUT = ("reshape", "permute", "slice")


@dataclass(frozen=True)
class _Scores:
    """``scale * product`` plus ``biases`` (value, negated?), or replaced by ``fill`` where ``where`` is ``kept``."""

    product: Value
    scale: float
    biases: tuple[tuple[Value, bool], ...] = ()
    where: Value | None = None
    fill: float = 0.0
    kept: bool = True


def find_attention(graph: Graph, forms: Forms = CPU) -> Graph:
    """``graph`` with every attention that is written out replaced."""
    values = live(graph)
    readers: dict[int, set[int]] = {v.id: set() for v in values}
    for v in values:
        for arg in v.args:
            readers[arg.id].add(v.id)
    for v in graph.outputs:
        readers[v.id].add(-1)
    b = Builder(RULES)
    new: dict[int, Value] = {}
    for v in values:
        found = _match(v, readers) if v.op == "matmul" else None
        heads = 0 if -1 in readers[v.id] else 1  # what is returned has the product's own strides
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
    """What the weights of the product ``v`` are a softmax of; ``None`` if they are not, or others read them."""
    inside: set[int] = {v.id}
    weights = _regrouped(v.args[0], inside)
    logits = _softmax_of(weights, inside)
    if logits is None:
        return None
    scores = _scores(logits, inside)
    if scores is None:
        return None
    inside.add(scores.product.id)
    hidden = inside - {v.id}
    return scores if all(readers[k] <= inside for k in hidden) else None


def _regrouped(v: Value, inside: set[int]) -> Value:
    """Past reshapes that divide leading axes in another way."""
    while v.op == "reshape" and v.args[0].shape[-2:] == v.shape[-2:]:
        inside.add(v.id)
        v = v.args[0]
    return v


def _softmax_of(v: Value, inside: set[int]) -> Value | None:
    """x where ``v`` is exp(x - max x) / sum exp(x - max x) along the last axis."""
    if v.op != "div" or v.args[0].op != "exp" or v.args[0].args[0].op != "sub":
        return None
    exps, shifted = v.args[0], v.args[0].args[0]
    found = {v.id, exps.id, shifted.id}
    logits = shifted.args[0]
    for part, kind, of in ((v.args[1], "sum", exps), (shifted.args[1], "max", logits)):
        while part.op in ("broadcast", "reshape"):
            found.add(part.id)
            part = part.args[0]
        axes = (len(logits.shape) - 1,)
        if part.op != "reduce" or part.args[0] is not of:
            return None
        if part.attrs["kind"] != kind or part.attrs["axes"] != axes:
            return None
        found.add(part.id)
    inside |= found
    return logits


def _scores(v: Value, inside: set[int]) -> _Scores | None:
    """``v`` as a product of two matrices under scales, biases and a fill, from the outside in."""
    if v.op == "matmul":
        return _Scores(v, 1.0)
    step = _STEPS.get(v.op)
    found = None if step is None else step(v, inside)
    if found is not None:
        inside.add(v.id)
    return found


def _reshape(v: Value, inside: set[int]) -> _Scores | None:
    return _scores(v.args[0], inside) if v.args[0].shape[-2:] == v.shape[-2:] else None


def _scaled(v: Value, inside: set[int]) -> _Scores | None:
    for x, y in (v.args, v.args[::-1]):
        if y.op == "fill" and not (v.op == "div" and y is v.args[0]):
            found = _scores(x, inside)
            number = float(y.attrs["value"])
            if found is None or found.biases or found.where is not None or number == 0:
                return None
            scale = found.scale / number if v.op == "div" else found.scale * number
            return replace(found, scale=scale) if math.isfinite(scale) else None
    return None


def _added(v: Value, inside: set[int]) -> _Scores | None:
    sides = (v.args, v.args[::-1]) if v.op == "add" else (v.args,)
    for x, y in sides:
        found = _scores(x, inside)
        if found is not None:
            return _biased(found, y, v.op == "sub")
    return None


def _fused(v: Value, inside: set[int]) -> _Scores | None:
    """bias * number + scores, as baddbmm leaves it, and scores * number + bias."""
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
            if found is None or found.biases or found.where is not None:
                return None
            return replace(found, where=condition, fill=float(y.attrs["value"]), kept=kept)
    return None


_STEPS: dict[str, Callable[[Value, set[int]], _Scores | None]] = {
    "reshape": _reshape,
    "mul": _scaled,
    "div": _scaled,
    "add": _added,
    "sub": _added,
    "fma": _fused,
    "where": _filled,
}


def _build(
    b: Builder, v: Value, scores: _Scores, new: dict[int, Value], heads: int, forms: Forms
) -> Value | None:
    """The attention in the place of the product ``v``."""
    q, kt = (new[a.id] for a in scores.product.args)
    rank = len(kt.shape)
    k = b.permute(kt, (*range(rank - 2), rank - 1, rank - 2))
    value = new[v.args[1].id]
    q, before = _without_scale(b, q)
    k, behind = _without_scale(b, k)
    scale = scores.scale * before * behind
    given = [new[x.id] for x, _ in scores.biases]
    conditions = [] if scores.where is None else [new[scores.where.id]]
    lead = _finest([*given, *conditions, *(_source(x) for x in (q, k, value)), v])
    q, k, value = (b.reshape(x, (*lead, *x.shape[-2:])) for x in (q, k, value))
    shape = (*lead, q.shape[-2], k.shape[-2])
    biases = [
        b.pointwise("neg", x) if negated else x
        for x, (_, negated) in zip(given, scores.biases, strict=True)
    ]
    bias: Value | None = None
    for x in biases:
        x = _seen_as(b, x, shape)
        bias = x if bias is None else _sum(b, bias, x)
    if conditions:
        keep = b.fill(math.nan, conditions[0].shape, v.dtype)
        other = b.fill(scores.fill, conditions[0].shape, v.dtype)
        order = (keep, other) if scores.kept else (other, keep)
        bias = _seen_as(b, b.pointwise("where", conditions[0], *order), shape)
    if why_not(q, k, value, bias, forms) is not None:
        return None
    made = attend(
        b, q, k, value, bias, scale, undefined=True, heads=heads, replaces=bool(conditions)
    )
    return b.reshape(made, v.shape)


def _seen_as(b: Builder, v: Value, shape: Shape) -> Value:
    """``v`` with its leading axes divided as in ``shape``; what is the same along those stays so."""
    if v.op == "broadcast" and v.shape != shape:
        pairs = list(zip(reversed(v.shape), reversed(shape), strict=False))
        same = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
        first, shift = len(v.shape) - same, len(shape) - len(v.shape)
        if all(a >= first for a in v.attrs["axes"]):
            axes = tuple(a + shift for a in v.attrs["axes"])
            return b.make("broadcast", v.args, shape, v.dtype, axes=axes)
    return b.reshape(v, shape)


def _source(v: Value) -> Value:
    """What a reshape that only merges leading axes was made from."""
    if v.op == "reshape" and v.args[0].shape[-2:] == v.shape[-2:] and repeats(v) is None:
        return v.args[0]
    return v


def _finest(values: list[Value]) -> Shape:
    """The leading axes that are divided furthest."""
    return max((v.shape[:-2] for v in values), key=len)


def _without_scale(b: Builder, v: Value) -> tuple[Value, float]:
    """``v`` before it was multiplied by a number (queries often are, as they leave their projection)."""
    if v.op == "mul":
        for x, y in (v.args, v.args[::-1]):
            if y.op == "fill" and math.isfinite(y.attrs["value"]) and y.attrs["value"] != 0:
                return x, float(y.attrs["value"])
    if v.op in _LAYOUT:
        inner, scale = _without_scale(b, v.args[0])
        if scale != 1:
            return b.make(v.op, (inner,), v.shape, v.dtype, **v.attrs), scale
    return v, 1.0


def _sum(b: Builder, x: Value, y: Value) -> Value:
    """x + y at the smallest shape both broadcast from."""
    pair = [(v.args[0], v.attrs["axes"]) if v.op == "broadcast" else None for v in (x, y)]
    if pair[0] is None or pair[1] is None:
        return b.pointwise("add", x, y)
    axes = tuple(sorted({*pair[0][1], *pair[1][1]}))
    core = tuple(x.shape[a] for a in axes)
    parts = [
        b.make("broadcast", (v,), core, v.dtype, axes=tuple(axes.index(a) for a in places))
        for v, places in (p for p in pair if p is not None)
    ]
    return b.make("broadcast", (b.pointwise("add", *parts),), x.shape, x.dtype, axes=axes)

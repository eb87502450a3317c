# SPDX-License-Identifier: Apache-2.0
"""Builds ``attention`` values: checks that the target supports the case, and chooses the result's layout.

    attend(b, q, k, v, bias, scale=0.125) -> [.., H, L, Dv], in memory [.., L, H, Dv]

Transformers then permute to [B, L, H, D] and reshape to [B, L, H * D]; in this layout both are views.
"""

import math

import sympy
import torch

from blade.backends.disc.ir.graph import IrBuilder, Value, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities
from blade.core.dtypes import HALVES
from blade.program.dtypes import DTYPES

MOST_AXES = 6  # per operand: the generated code iterates over four leading axes


def why_not(
    q: Value, k: Value, v: Value, bias: Value | None, forms: TargetCapabilities = CPU
) -> str | None:
    """Why these operands cannot make an ``attention`` on a target with ``forms``; ``None`` if they can."""
    operands = [x for x in (q, k, v, bias) if x is not None]
    wide = bias is not None and bias.dtype == torch.float32 and q.dtype in HALVES
    same = operands[:-1] if wide else operands
    if q.dtype not in forms.attention or any(x.dtype != q.dtype for x in same):
        found = ", ".join(sorted({DTYPES[x.dtype] for x in operands}))
        return f"attention of {found} is not generated"
    if any(len(x.shape) > MOST_AXES for x in operands):
        return f"an operand has more than {MOST_AXES} axes"
    widest = forms.widest_head
    heads = (q.shape[-1], v.shape[-1])
    if widest is not None and not all(isinstance(d, int) and 0 < d <= widest for d in heads):
        return f"heads of {heads[0]} and {heads[1]}, not all known to be at most {widest}"
    return None


def attend(
    b: IrBuilder,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    scale: float,
    causal: bool = False,
    undefined: bool = False,
    heads: int = 1,
    hides: bool = False,
    cap: float = 0.0,
    fill: float | None = None,
    sink: Value | None = None,
) -> Value:
    """q [*lead, L, D], k [*lead, S, D], v [*lead, S, Dv], bias [*lead, L, S] -> [*lead, L, Dv].

    ``heads``: number of trailing leading axes that lie within a query's row in memory. ``undefined``: a row
    whose scores are all -inf gives NaN, like a softmax written out; torch's fused op gives 0. ``hides``: keys whose
    bias makes their weights 0 need not be read, as those of torch's fused op; a softmax written out multiplies their
    NaN by 0. ``cap``: scores become cap * tanh(score / cap) before the bias, unless it is 0. ``fill``: a bias that is
    this number replaces the score, others are added. ``sink`` [*lead, 1, 1]: the score of one more key, whose value
    is 0.
    """
    bias = None if bias is None or changes_nothing(bias) else bias
    if heads == 1 and repeats(k) is not None and repeats(k) == repeats(v):
        k, v = k.args[0].args[0], v.args[0].args[0]
        return grouped(b, q, k, v, bias, scale, causal, undefined, hides, cap, fill, sink)
    lead, rank = q.shape[:-2], len(q.shape)
    assert all(x.shape[:-2] == lead for x in (k, v)), (q, k, v)
    heads = min(heads, len(lead))
    place = len(lead) - heads  # position of the query axis in the result
    shape = (*lead[:place], q.shape[-2], *lead[place:], v.shape[-1])
    args = [x for x in (q, k, v, bias, sink) if x is not None]
    made = b.make(
        "attention",
        args,
        shape,
        q.dtype,
        scale=float(scale),
        causal=causal,
        undefined=undefined,
        heads=heads,
        hides=hides,
        cap=float(cap),
        fill=None if bias is None else fill,
        sink=sink is not None,
    )
    back = [*range(place), *range(place + 1, rank - 1), place, rank - 1]
    return b.permute(made, back)


def bias_and_sink(v: Value) -> tuple[Value | None, Value | None]:
    """The operands of an ``attention`` beside queries, keys and values."""
    rest = list(v.args[3:])
    sink = rest.pop() if v.attrs.get("sink") else None
    return (rest[0] if rest else None), sink


def changes_nothing(bias: Value) -> bool:
    """Whether ``bias`` has no effect: zeros, as of a mask that hides nothing."""
    return bias.op == "fill" and float(bias.attrs["value"]) == 0


def grouped(
    b: IrBuilder,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    scale: float,
    causal: bool = False,
    undefined: bool = False,
    hides: bool = False,
    cap: float = 0.0,
    fill: float | None = None,
    sink: Value | None = None,
) -> Value:
    """Grouped-query attention: heads of q [.., H, L, D] share those of k and v [.., Hkv, S, D]
    without copies.
    """
    lead, head, few = q.shape[:-3], q.shape[-3], k.shape[-3]
    group = plain(sympy.sympify(head) / few)
    count = len(lead)
    wide = (*lead, few, group)
    q = b.reshape(q, (*wide, *q.shape[-2:]))
    axes = (*range(count + 1), count + 2, count + 3)
    k, v = (b.make("broadcast", (x,), (*wide, *x.shape[-2:]), x.dtype, axes=axes) for x in (k, v))
    if bias is not None:
        bias = _split_heads(b, bias, few, group)
    if sink is not None:
        sink = _split_heads(b, sink, few, group)
    y = attend(b, q, k, v, bias, scale, causal, undefined, 2, hides, cap, fill, sink)
    # Merge the heads in memory order, where they are adjacent: the result stays a permutation.
    rank = len(y.shape)
    y = b.permute(y, (*range(count), rank - 2, count, count + 1, rank - 1))
    y = b.reshape(y, (*lead, y.shape[count], head, y.shape[-1]))
    return b.permute(y, (*range(count), count + 1, count, count + 2))


def widened(b: IrBuilder, bias: Value) -> Value:
    """``bias`` as float32, converted before it is broadcast."""
    if bias.op != "broadcast":
        return b.cast(bias, torch.float32)
    inner = b.cast(bias.args[0], torch.float32)
    return b.make("broadcast", (inner,), bias.shape, torch.float32, **bias.attrs)


def repeats(v: Value) -> Dim | None:
    """The repeat count if ``v`` repeats each head, [.., Hkv, g, S, D] reshaped to [.., H, S, D]; else
    ``None``.
    """
    if v.op != "reshape" or v.args[0].op != "broadcast":
        return None
    wide = v.args[0]
    rank, place = len(wide.shape), len(v.shape) - 2
    if rank != len(v.shape) + 1 or rank > MOST_AXES or wide.shape[place + 1 :] != v.shape[-2:]:
        return None
    repeats = wide.attrs["axes"] == (*range(place), *range(place + 1, rank))
    return wide.shape[place] if repeats and wide.shape[: place - 1] == v.shape[:-3] else None


def unrepeated(x: Value) -> Value | None:
    """[.., H, S, D] if ``x`` [.., H * group, S, D] repeats each of its heads in place; else ``None``."""
    if x.op != "reshape" or x.args[0].op != "broadcast":
        return None
    wide, rank = x.args[0], len(x.shape)
    few, group = wide.shape[rank - 3 : rank - 1]
    axes = (*range(rank - 2), rank - 1, rank)
    known = isinstance(few, int) and isinstance(group, int)
    if not known or wide.attrs["axes"] != axes or len(wide.shape) != rank + 1:
        return None
    whole = (*wide.shape[: rank - 3], few * group, *wide.shape[-2:])
    return wide.args[0] if whole == x.shape else None


def _split_heads(b: IrBuilder, bias: Value, few: Dim, group: Dim) -> Value:
    """Reshape a bias [.., H, L, S] to (few, group) heads; a bias broadcast over heads stays broadcast."""
    shape = (*bias.shape[:-3], few, group, *bias.shape[-2:])
    place = len(bias.shape) - 3
    if bias.op == "broadcast" and place not in bias.attrs["axes"]:
        axes = tuple(a if a < place else a + 1 for a in bias.attrs["axes"])
        return b.make("broadcast", bias.args, shape, bias.dtype, axes=axes)
    return b.reshape(bias, shape)


def reference(
    v: Value,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: torch.Tensor | None,
) -> torch.Tensor:
    """The reference semantics of ``attention``. ``causal``: query i sees keys up to i."""
    *given, sink = rest if v.attrs["sink"] else (*rest, None)
    bias = given[0] if given else None
    cap, fill = v.attrs["cap"], v.attrs["fill"]
    scores = query @ key.mT * v.attrs["scale"]
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if bias is not None:
        added = scores + bias
        scores = added if fill is None else torch.where(bias == fill, bias, added)
    if v.attrs["causal"]:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
        none = value.new_zeros(*value.shape[:-2], 1, value.shape[-1])
        value = torch.cat([value, none], -2)
    weights = scores.softmax(-1)
    if not v.attrs["undefined"]:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    result: torch.Tensor = (weights @ value).movedim(-2, -2 - v.attrs["heads"])
    return result

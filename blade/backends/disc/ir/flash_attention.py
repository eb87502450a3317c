# SPDX-License-Identifier: Apache-2.0
"""Attention in training: the results, the log-sum-exp of each row for the gradient, and the gradient.

    flash_attention q k v bias? {scale, causal}
    flash_attention_gradient g q k v logs delta bias? {scale, causal}

q is [B, H, L, D], k [B, H, S, D], v [B, H, S, E], bias [B, H, L, S]. With scores = scale * q @ k.T + bias
and logs = log(sum(exp(scores))) [B, H, L], the weights of the values are exp(scores - logs). They are
recomputed when needed, never stored. With delta = sum(g * result) [B, H, L], and
ds = weights * (g @ v.T - delta),

    dv = weights.T @ g        dq = scale * ds @ k        dk = scale * ds.T @ q

Source: Dao et al., "FlashAttention", 2022. An instruction has one buffer. The first op's holds results
[B, L, H, E], then logs; the second one's dq [B, L, H, D], dk [B, S, H, D] and dv [B, S, H, E].
"""

import math
from collections.abc import Sequence

import sympy
import torch

from blade.backends.disc.ir.graph import (
    IrBuilder,
    Shape,
    Value,
    numel,
    plain,
)


def attend_and_sum(
    b: IrBuilder, q: Value, k: Value, v: Value, bias: Value | None, scale: float, causal: bool
) -> tuple[Value, Value]:
    """Results [B, H, L, E] and logs [B, H, L]."""
    batch, heads, queries, _ = q.shape
    shapes = (batch, queries, heads, v.shape[-1]), (batch, heads, queries)
    args = (q, k, v) if bias is None else (q, k, v, bias)
    results, logs = _parts(b, "flash_attention", args, shapes, scale, causal)
    return b.permute(results, (0, 2, 1, 3)), logs


def attention_gradient(
    b: IrBuilder,
    g: Value,
    operands: tuple[Value, Value, Value],
    logs: Value,
    delta: Value,
    bias: Value | None,
    scale: float,
    causal: bool,
) -> tuple[Value, ...]:
    """Gradients of ``operands`` (q, k, v), each with its operand's shape."""
    shapes = tuple((x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in operands)
    args = [g, *operands, logs, delta, *([] if bias is None else [bias])]
    found = _parts(b, "flash_attention_gradient", args, shapes, scale, causal)
    return tuple(b.permute(x, (0, 2, 1, 3)) for x in found)


def _parts(
    b: IrBuilder,
    op: str,
    args: Sequence[Value],
    shapes: Sequence[Shape],
    scale: float,
    causal: bool,
) -> list[Value]:
    """The instruction ``op``, and the parts of its buffer that have these shapes."""
    sizes = [sympy.sympify(numel(shape)) for shape in shapes]
    shape = (plain(sum(sizes)),)
    whole = b.make(op, args, shape, args[0].dtype, scale=scale, causal=causal)
    found, start = [], sympy.Integer(0)
    for part, size in zip(shapes, sizes, strict=True):
        found.append(b.reshape(b.slice(whole, 0, plain(start), 1, plain(size)), part))
        start = start + size
    return found


def why_not(q: Value, k: Value, v: Value, bias: Value | None) -> str | None:
    """Why these operands cannot make the ops; ``None`` if they can."""
    operands = (q, k, v) if bias is None else (q, k, v, bias)
    if any(x.dtype != torch.float32 for x in operands):
        return "attention is generated for float32"
    if any(len(x.shape) != 4 for x in (q, k, v)):
        return "the axes are not batch, heads, places and depth"
    heads = {x.shape[1] for x in (q, k, v)}
    if len(heads) > 1 and all(isinstance(n, int) for n in heads):
        return "queries share heads of keys"
    return None


def reference(value: Value, *tensors: torch.Tensor) -> torch.Tensor:
    """``value``, either op, computed by torch from its operands."""
    if value.op == "flash_attention":
        q, k, v, *bias = tensors
        scores = _scores(value, q, k, bias)
        logs = scores.logsumexp(-1)
        results = _weights(scores, logs) @ v
        return torch.cat([results.transpose(1, 2).flatten(), logs.flatten()])
    g, q, k, v, logs, delta, *bias = tensors
    weights = _weights(_scores(value, q, k, bias), logs)
    slopes = weights * (g @ v.mT - delta[..., None]) * value.attrs["scale"]
    found = (slopes @ k, slopes.mT @ q, weights.mT @ g)
    return torch.cat([x.transpose(1, 2).flatten() for x in found])


def _scores(
    value: Value, q: torch.Tensor, k: torch.Tensor, bias: Sequence[torch.Tensor]
) -> torch.Tensor:
    scores: torch.Tensor = q @ k.mT * value.attrs["scale"] + (bias[0] if bias else 0.0)
    if value.attrs["causal"]:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _weights(scores: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """exp(scores - logs); zero for rows without keys."""
    found: torch.Tensor = (scores - logs[..., None]).exp()
    return found.masked_fill((logs == -math.inf)[..., None], 0.0)

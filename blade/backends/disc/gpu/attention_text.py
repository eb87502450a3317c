# SPDX-License-Identifier: Apache-2.0
"""The Triton text of attention: a block of queries against all keys, the softmax on the fly.

A program takes BLOCK_L queries of one head and walks the keys BLOCK_S at a time; it keeps the largest score
of each row, the sum of the exponentials and the weighted sum of the values, and rescales them when a larger
score appears (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). Keys that every row of the
block sees whole go without masks. Scores are f32 whatever the operands are.

SCALE has the factor log2(e) in it, so that powers of two serve. FOLDED: it is positive and there is no bias;
then it meets the scores in the subtraction of the maximum, one multiplication the fewer for each. BIAS: 0 none,
1 added to the score, 2 in the score's place except where it is NaN; the lowest numbers of f32, which that
factor would make infinite, become the lowest one (a row of them has equal weights, as it should).
SPLIT: so many programs share the keys of a block of queries; another kernel combines what they leave.
"""

from collections.abc import Sequence

from blade.backends.disc.gpu.gemm_text import EARLY

_IMPORTS = "import triton\nimport triton.language as tl\n"
_VISIT = '''\


@triton.jit
def visit(
    q, k, v, bias, rows, start, stop, queries, keys, K_ROW, V_ROW, BIAS_QUERY, BIAS_KEY,
    acc, total, top,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, SCALE: tl.constexpr, FOLDED: tl.constexpr, BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """Keys ``start`` to ``stop``, in whole blocks; MASKED: some do not exist, or lie in the future."""
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    for first in range(start, stop, BLOCK_S):
        column = first + tl.arange(0, BLOCK_S)
        far = column.to(tl.int64)
        k_at = k + far[None, :] * K_ROW + d[:, None]
        if MASKED:
            kt = tl.load(k_at, mask=(column[None, :] < keys) & (d[:, None] < D), other=0.0)
        elif BLOCK_D == D:
            kt = tl.load(k_at)
        else:
            kt = tl.load(k_at, mask=d[:, None] < D, other=0.0)
        scores = tl.dot(q, kt, input_precision=PRECISION)
        if not FOLDED:
            scores = scores * SCALE
        if BIAS > 0:
            if BIAS_ROWS:
                b_at = bias + rows.to(tl.int64)[:, None] * BIAS_QUERY + far[None, :] * BIAS_KEY
                there = (rows[:, None] < queries) & (column[None, :] < keys)
                b = tl.load(b_at, mask=there, other=0.0)
            else:
                b = tl.load(bias + far * BIAS_KEY, mask=column < keys, other=0.0)[None, :]
            b = b.to(tl.float32)
            never = b == float("-inf")
            b = b * 1.4426950408889634
            if q.dtype != tl.float16:
                least = tl.maximum(b, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
                b = tl.where(never, b, least)
            if BIAS == 1:
                scores = scores + b
            else:
                scores = tl.where(b == b, b, scores)
        if MASKED:
            seen = column[None, :] < keys
            if CAUSAL:
                seen = seen & (column[None, :] <= rows[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.max(scores, 1)
        if FOLDED:
            peak = peak * SCALE
        new = tl.maximum(top, peak)
        base = tl.where(new == float("-inf"), 0.0, new)
        if FOLDED:
            p = tl.exp2(scores * SCALE - base[:, None])
        else:
            p = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        v_at = v + far[:, None] * V_ROW + e[None, :]
        if MASKED:
            x = tl.load(v_at, mask=(column[:, None] < keys) & (e[None, :] < E), other=0.0)
        elif BLOCK_E == E:
            x = tl.load(v_at)
        else:
            x = tl.load(v_at, mask=e[None, :] < E, other=0.0)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(x.dtype), x, acc * decay[:, None], input_precision=PRECISION)
        top = new
    return acc, total, top
'''

_KERNEL = """

@triton.jit
def kernel(
    %(pointers)s, %(numbers)s
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, SCALE: tl.constexpr, FOLDED: tl.constexpr,
    BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, CAUSAL: tl.constexpr, UNDEFINED: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):
%(launch)s    queries = tl.cast(L, tl.int32)
    keys = tl.cast(S, tl.int32)
    program = tl.program_id(0)
    part = program %% SPLIT
    program = program // SPLIT
    blocks = tl.cdiv(queries, BLOCK_L)
    block = program %% blocks
    head = program // blocks
    rest = head
%(lead)s    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    there = rows[:, None] < queries
    q_at = q + rows.to(tl.int64)[:, None] * Q_ROW + d[None, :]
%(wait)s    x = tl.load(q_at, mask=there & (d[None, :] < D), other=0.0)
    acc = tl.zeros((BLOCK_L, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_L,), tl.float32)
    top = tl.full((BLOCK_L,), float("-inf"), tl.float32)
    start = 0
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (block + 1) * BLOCK_L)
    if SPLIT > 1:
        share = tl.cdiv(tl.cdiv(keys, BLOCK_S), SPLIT) * BLOCK_S
        start = part * share
        stop = tl.minimum(stop, start + share)
    whole = stop
    if CAUSAL:
        whole = tl.minimum(stop, block * BLOCK_L)
    whole = tl.maximum(start, start + (whole - start) // BLOCK_S * BLOCK_S)
    acc, total, top = visit(
        x, k, v, bias, rows, start, whole, queries, keys, K_ROW, V_ROW, BIAS_QUERY, BIAS_KEY,
        acc, total, top, D, E, BLOCK_D, BLOCK_E, BLOCK_S, SCALE, FOLDED, BIAS, BIAS_ROWS, CAUSAL,
        PRECISION, False,
    )
    acc, total, top = visit(
        x, k, v, bias, rows, whole, stop, queries, keys, K_ROW, V_ROW, BIAS_QUERY, BIAS_KEY,
        acc, total, top, D, E, BLOCK_D, BLOCK_E, BLOCK_S, SCALE, FOLDED, BIAS, BIAS_ROWS, CAUSAL,
        PRECISION, True,
    )
"""

_WHOLE = """\
    nothing = total == 0.0
    if UNDEFINED:
        nothing = nothing & (keys == 0)
    y = tl.where(nothing[:, None], 0.0, acc / total[:, None])
    out_at = out + rows.to(tl.int64)[:, None] * O_ROW + e[None, :]
    tl.store(out_at, y.to(out.dtype.element_ty), mask=there & (e[None, :] < E))
"""

_PART = """\
    row = (head.to(tl.int64) * queries + rows) * SPLIT + part
    tl.store(sums + row[:, None] * E + e[None, :], acc, mask=there & (e[None, :] < E))
    tl.store(totals + row, total, mask=rows < queries)
    tl.store(tops + row, top, mask=rows < queries)
"""

_COMBINE = '''\


@triton.jit
def kernel(
    sums, totals, tops, out, %(numbers)s
    E: tl.constexpr, BLOCK_E: tl.constexpr, UNDEFINED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One query of one head: the parts, weighted by how their largest scores compare."""
%(launch)s    queries = tl.cast(L, tl.int32)
    program = tl.program_id(0)
    row = program %% queries
    rest = program // queries
%(lead)s    part = program.to(tl.int64) * SPLIT + tl.arange(0, SPLIT)
    e = tl.arange(0, BLOCK_E)
%(wait)s    top = tl.load(tops + part)
    new = tl.max(top, 0)
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(top - base)
    total = tl.sum(tl.load(totals + part) * weight, 0)
    x = tl.load(sums + part[:, None] * E + e[None, :], mask=e[None, :] < E, other=0.0)
    y = tl.sum(x * weight[:, None], 0) / total
    if not UNDEFINED:
        y = tl.where(total == 0.0, 0.0, y)
    tl.store(out + row.to(tl.int64) * O_ROW + e, y.to(out.dtype.element_ty), mask=e < E)
'''


def attention_text(numbers: Sequence[str], rank: int, split: bool, early: bool) -> str:
    """``numbers``: sizes and strides; ``rank``: how many leading axes there are.

    ``early``: the launch before may still run; nothing is read until it has ended.
    """
    pointers = "q, k, v, bias, " + ("sums, totals, tops" if split else "out")
    walked = ("q", "k", "v", "bias") if split else ("q", "k", "v", "bias", "out")
    names = {"pointers": pointers, "numbers": _listed(numbers), "lead": _lead(rank, walked)}
    text = _VISIT + _KERNEL % (names | _around(early)) + (_PART if split else _WHOLE)
    return _IMPORTS + EARLY * early + text


def combine_text(numbers: Sequence[str], rank: int, early: bool) -> str:
    """What puts the parts of a split attention together."""
    names = {"numbers": _listed(numbers), "lead": _lead(rank, ("out",))}
    return _IMPORTS + EARLY * early + _COMBINE % (names | _around(early))


def _around(early: bool) -> dict[str, str]:
    launch, wait = "    gdc_launch_dependents()\n", "    gdc_wait()\n"
    return {"launch": launch * early, "wait": wait * early}


def _listed(numbers: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in numbers)


def _lead(rank: int, pointers: Sequence[str]) -> str:
    """Move ``pointers`` to where the leading axes, of which ``rest`` counts the elements, are."""
    lines = []
    for axis in reversed(range(rank)):
        if axis:
            lines += [f"size = tl.cast(N{axis}, tl.int32)", "at = (rest % size).to(tl.int64)"]
        else:
            lines += ["at = rest.to(tl.int64)"]
        lines += [f"{p} += at * {p.upper()}_{axis}" for p in pointers]
        lines += ["rest = rest // size"] if axis else []
    return "".join(f"    {line}\n" for line in lines)

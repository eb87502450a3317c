# SPDX-License-Identifier: Apache-2.0
"""The Triton text of attention: a block of queries against all keys, with an online softmax.

A program takes BLOCK_L queries of one head and walks the keys BLOCK_S at a time. It keeps the largest score
of each row, the sum of the exponentials and the weighted sum of the values, and rescales them when a larger
score appears (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). Blocks of keys that all rows see
entirely need no mask. Scores are f32 for all operand types.

SCALE includes the factor log2(e), so that exp2 replaces exp. FOLDED: the scale is positive and there is neither a
cap nor a bias; the subtraction of the maximum then applies it, which saves one multiplication per score.
CAP: 0, or scores become CAP * tanh(score), and then CAP has this factor and SCALE is without it.
BIAS: 0 none, 1 added to the score, 2 replaces the score if it is FILL and is added otherwise. The lowest numbers of
f32, which the factor would make infinite, become the lowest finite one (a row of them has equal weights, as it
should).
REST_D, REST_E: columns of keys and of values beyond BLOCK_D and BLOCK_E. The sum need not be a power of two
(80 = 64 + 16): no padding is read or multiplied.
BIAS_ROWS: the bias has a row for every query. EVEN divides the starts of these rows and the number of keys.
CAUSAL: programs start in the order of their numbers, so those with the most keys come first, over all
heads, and the last programs are short.
EXACT: all blocks of keys are whole.
sink: the score of one more key, whose value is 0: the largest score and the sum begin with it.
PARTS: the number of programs that split the keys of a block of queries; another kernel combines their
results.
bounds: the first key that ROWS queries see and the end of the last, which another kernel finds in the bias; with few
queries, this kernel itself does. Keys outside are left out: a bias of at most NEVER makes their weights 0 in float32
beside a bias of more than SEEN.
"""

from collections.abc import Sequence

from blade.backends.disc.gpu.emit.device_functions import EARLY

_IMPORTS = "import triton\nimport triton.language as tl\nfrom triton.language.extra.cuda import libdevice\n"
_VISIT = '''\


@triton.jit
def loaded(at, seen, inside, MASKED: tl.constexpr, WHOLE: tl.constexpr):
    if MASKED:
        x = tl.load(at, mask=seen & inside, other=0.0)
    elif WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x


@triton.jit
def visit(
    q, q_rest, k, v, bias, row, start, stop, queries, keys, K_ROW, V_ROW, BIAS_QUERY, BIAS_KEY,
    acc, acc_rest, total, top,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    REST_D: tl.constexpr, REST_E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FOLDED: tl.constexpr, BIAS: tl.constexpr,
    FILL: tl.constexpr, BIAS_ROWS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """Keys ``start`` to ``stop``, in whole blocks; MASKED: some do not exist, or lie in the future."""
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    beside = tl.arange(0, BLOCK_S)
    rows = row + tl.arange(0, BLOCK_L)
    if BIAS_ROWS:  # rows that do not exist have the last one's bias
        below = tl.minimum(rows, queries - 1) - tl.minimum(row, queries - 1)
        bias += tl.minimum(row, queries - 1).to(tl.int64) * BIAS_QUERY // EVEN * EVEN
        b_at = (below * tl.cast(BIAS_QUERY, tl.int32) // EVEN * EVEN)[:, None]
        b_at += beside[None, :] * tl.cast(BIAS_KEY, tl.int32)
    for first in range(start, stop, BLOCK_S):
        column = first + beside
        far = column.to(tl.int64)
        exist = column < keys
        k_at = k + far[None, :] * K_ROW + d[:, None]
        kt = loaded(k_at, exist[None, :], d[:, None] < D, MASKED, BLOCK_D <= D)
        scores = tl.dot(q, kt, input_precision=PRECISION)
        if REST_D > 0:
            d_rest = BLOCK_D + tl.arange(0, REST_D)
            k_at = k + far[None, :] * K_ROW + d_rest[:, None]
            kt = loaded(k_at, exist[None, :], d_rest[:, None] < D, MASKED, BLOCK_D + REST_D == D)
            scores = tl.dot(q_rest, kt, scores, input_precision=PRECISION)
        if not FOLDED:
            scores = scores * SCALE
        if CAP > 0:
            scores = libdevice.tanh(scores) * CAP
        if BIAS > 0:
            if BIAS_ROWS:
                here = bias + tl.cast(first, tl.int64) * BIAS_KEY
                b = loaded(here + b_at, exist[None, :], exist[None, :], MASKED, True)
            else:
                b = loaded(bias + far * BIAS_KEY, exist, exist, MASKED, True)[None, :]
            b = b.to(tl.float32)
            never = b == float("-inf")
            fills = b == FILL
            b = b * 1.4426950408889634
            if bias.dtype.element_ty != tl.float16:
                least = tl.maximum(b, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
                b = tl.where(never, b, least)
            if BIAS == 1:
                scores = scores + b
            else:
                scores = tl.where(fills, b, scores + b)
        if MASKED:
            seen = exist[None, :]
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
        total = total * decay + tl.sum(p, 1)
        v_at = v + far[:, None] * V_ROW + e[None, :]
        x = loaded(v_at, exist[:, None], e[None, :] < E, MASKED, BLOCK_E <= E)
        p = p.to(x.dtype)
        acc = tl.dot(p, x, acc * decay[:, None], input_precision=PRECISION)
        if REST_E > 0:
            e_rest = BLOCK_E + tl.arange(0, REST_E)
            v_at = v + far[:, None] * V_ROW + e_rest[None, :]
            x = loaded(v_at, exist[:, None], e_rest[None, :] < E, MASKED, BLOCK_E + REST_E == E)
            acc_rest = tl.dot(p, x, acc_rest * decay[:, None], input_precision=PRECISION)
        top = new
    return acc, acc_rest, total, top
'''

_KERNEL = """

@triton.jit
def kernel(
    %(pointers)s, %(numbers)s
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    REST_D: tl.constexpr, REST_E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FOLDED: tl.constexpr, BIAS: tl.constexpr,
    FILL: tl.constexpr, BIAS_ROWS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    UNDEFINED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,%(how)s
):
%(launch)s    queries = tl.cast(L, tl.int32)
    keys = tl.cast(S, tl.int32) // EVEN * EVEN
    program = tl.program_id(0)
%(share)s    blocks = tl.cdiv(queries, BLOCK_L)
    if CAUSAL:  # the longest first
        heads = tl.num_programs(0) // blocks
        block = blocks - 1 - program // heads
        head = program %% heads
    else:
        block = program %% blocks
        head = program // blocks
    rest = head
%(lead)s    row = block * BLOCK_L
    rows = row + tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    there = rows[:, None] < queries
    q += rows.to(tl.int64)[:, None] * Q_ROW
%(wait)s    x = tl.load(q + d[None, :], mask=there & (d[None, :] < D), other=0.0)
    x_rest = x
    if REST_D > 0:
        d = BLOCK_D + tl.arange(0, REST_D)
        x_rest = tl.load(q + d[None, :], mask=there & (d[None, :] < D), other=0.0)
    acc = tl.zeros((BLOCK_L, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_L,), tl.float32)
    acc_rest = total
    if REST_E > 0:
        acc_rest = tl.zeros((BLOCK_L, REST_E), tl.float32)
    top = tl.full((BLOCK_L,), float("-inf"), tl.float32)
%(sink)s    start = 0
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (block + 1) * BLOCK_L)
%(part)s    whole = stop
    if CAUSAL:
        whole = tl.minimum(stop, block * BLOCK_L)
    whole = tl.maximum(start, start + (whole - start) // BLOCK_S * BLOCK_S)
    acc, acc_rest, total, top = visit(
        x, x_rest, k, v, bias, row, start, whole, queries, keys, K_ROW, V_ROW, BIAS_QUERY,
        BIAS_KEY, acc, acc_rest, total, top, D, E, BLOCK_D, BLOCK_E, REST_D, REST_E, BLOCK_L,
        BLOCK_S, SCALE, CAP, FOLDED, BIAS, FILL, BIAS_ROWS, EVEN, CAUSAL, PRECISION, False,
    )
    if not EXACT:
        acc, acc_rest, total, top = visit(
            x, x_rest, k, v, bias, row, whole, stop, queries, keys, K_ROW, V_ROW, BIAS_QUERY,
            BIAS_KEY, acc, acc_rest, total, top, D, E, BLOCK_D, BLOCK_E, REST_D, REST_E, BLOCK_L,
            BLOCK_S, SCALE, CAP, FOLDED, BIAS, FILL, BIAS_ROWS, EVEN, CAUSAL, PRECISION, True,
        )
"""

_SINK = """\
    one = tl.load(sink + rows.to(tl.int64) * SINK_QUERY, mask=rows < queries, other=float("-inf"))
    top = one.to(tl.float32) * 1.4426950408889634
%(first)s    total = tl.where(top == float("-inf"), 0.0, 1.0)
"""

_FIRST = """\
    top = tl.where(part == 0, top, float("-inf"))
"""

_SHARE = """\
    parts = tl.cast(PARTS, tl.int32)
    part = program % parts
    program = program // parts
"""

_PART = """\
    share = tl.cdiv(tl.cdiv(stop, BLOCK_S), parts) * BLOCK_S
    start = part * share
    stop = tl.minimum(stop, start + share)
"""

_FIND = '''\


@triton.jit
def find(
    bias, row, queries, keys, BIAS_QUERY, BIAS_KEY,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BIAS_ROWS: tl.constexpr, EVEN: tl.constexpr,
    NEVER: tl.constexpr, SEEN: tl.constexpr,
):
    """The first key that ROWS queries see and the end of the last, or all keys if a query sees none."""
    beside = tl.arange(0, CHUNK)
    rows = tl.minimum(row + tl.arange(0, ROWS), queries - 1)
    if BIAS_ROWS:
        bias += (rows.to(tl.int64) * BIAS_QUERY // EVEN * EVEN)[:, None]
    first = tl.full((ROWS, CHUNK), keys, tl.int32)
    last = tl.full((ROWS, CHUNK), -1, tl.int32)
    most = tl.full((ROWS, CHUNK), float("-inf"), tl.float32)
    for begin in range(0, keys, CHUNK):
        column = (begin + beside)[None, :]
        here = bias + column.to(tl.int64) * BIAS_KEY
        x = tl.load(here, mask=column < keys, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, 0.0)
        most = tl.maximum(most, x)
        first = tl.minimum(first, tl.where(x > NEVER, column, keys))
        last = tl.maximum(last, tl.where(x > NEVER, column, -1))
    top = tl.max(most, 1)
    blind = tl.max(((top > float("-inf")) & (top <= SEEN)).to(tl.int32), 0)
    first = tl.min(tl.min(first, 1), 0) * (1 - blind)
    end = tl.maximum(tl.max(tl.max(last, 1), 0) + 1, keys * blind)
    return first, end
'''

_FOUND = """\
    first, end = find(
        bias, row, queries, keys, BIAS_QUERY, BIAS_KEY, ROWS, CHUNK, BIAS_ROWS, EVEN, NEVER, SEEN
    )
"""

_KNOWN = """\
    if BIAS_ROWS:
        group = block * (BLOCK_L // ROWS) + tl.arange(0, BLOCK_L // ROWS)
        known = group < tl.cdiv(queries, ROWS)
        first = tl.min(tl.load(bounds + group * 2, mask=known, other=keys), 0)
        end = tl.max(tl.load(bounds + group * 2 + 1, mask=known, other=0), 0)
    else:
        first = tl.load(bounds)
        end = tl.load(bounds + 1)
"""

_SEEN = """\
    past = first // BLOCK_S * BLOCK_S
    k += past.to(tl.int64) * K_ROW
    v += past.to(tl.int64) * V_ROW
    bias += past.to(tl.int64) * BIAS_KEY
    keys -= past
    stop = tl.minimum(keys, tl.cdiv(end - past, BLOCK_S) * BLOCK_S)
"""

_BOUNDS = '''\


@triton.jit
def kernel(
    bias, bounds, %(numbers)s
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BIAS_ROWS: tl.constexpr, EVEN: tl.constexpr,
    NEVER: tl.constexpr, SEEN: tl.constexpr,
):
    """What ROWS queries see of the keys."""
%(launch)s    queries = tl.cast(L, tl.int32)
    keys = tl.cast(S, tl.int32) // EVEN * EVEN
    rest = tl.program_id(0)
    row = 0
    if BIAS_ROWS:
        groups = tl.cdiv(queries, ROWS)
        row = rest %% groups * ROWS
        rest = rest // groups
%(lead)s%(wait)s%(found)s    bounds += tl.program_id(0) * 2
    tl.store(bounds, first)
    tl.store(bounds + 1, end)
'''

_WHOLE = """\
    nothing = total == 0.0
    if UNDEFINED:
        nothing = nothing & (keys == 0)
    out += rows.to(tl.int64)[:, None] * O_ROW
    total = tl.where(nothing, 1.0, total)
    y = acc / total[:, None]
    tl.store(out + e[None, :], y.to(out.dtype.element_ty), mask=there & (e[None, :] < E))
    if REST_E > 0:
        e = BLOCK_E + tl.arange(0, REST_E)
        y = acc_rest / total[:, None]
        tl.store(out + e[None, :], y.to(out.dtype.element_ty), mask=there & (e[None, :] < E))
"""

_LEFT = """\
    place = (head.to(tl.int64) * queries + rows) * parts + part
    sums += place[:, None] * E
    tl.store(sums + e[None, :], acc, mask=there & (e[None, :] < E))
    if REST_E > 0:
        e = BLOCK_E + tl.arange(0, REST_E)
        tl.store(sums + e[None, :], acc_rest, mask=there & (e[None, :] < E))
    tl.store(totals + place, total, mask=rows < queries)
    tl.store(tops + place, top, mask=rows < queries)
"""

_COMBINE = '''\


@triton.jit
def kernel(
    sums, totals, tops, out, %(numbers)s
    E: tl.constexpr, BLOCK_E: tl.constexpr, UNDEFINED: tl.constexpr, MOST: tl.constexpr,
):
    """One query of one head: the parts, weighted by how their largest scores compare."""
%(launch)s    queries = tl.cast(L, tl.int32)
    program = tl.program_id(0)
    row = program %% queries
    rest = program // queries
%(lead)s    parts = tl.cast(PARTS, tl.int32)
    each = tl.arange(0, MOST)
    place = program.to(tl.int64) * parts + each
    e = tl.arange(0, BLOCK_E)
%(wait)s    top = tl.load(tops + place, mask=each < parts, other=float("-inf"))
    new = tl.max(top, 0)
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(top - base)
    total = tl.sum(tl.load(totals + place, mask=each < parts, other=0.0) * weight, 0)
    there = (each < parts)[:, None] & (e < E)[None, :]
    x = tl.load(sums + place[:, None] * E + e[None, :], mask=there, other=0.0)
    if not UNDEFINED:
        total = tl.where(total == 0.0, 1.0, total)
    y = tl.sum(x * weight[:, None], 0) / total
    tl.store(out + row.to(tl.int64) * O_ROW + e, y.to(out.dtype.element_ty), mask=e < E)
'''


def attention_text(
    numbers: Sequence[str],
    rank: int,
    split: bool,
    early: bool,
    seen: str = "",
    sink: bool = False,
) -> str:
    """The module; ``numbers``: names of sizes and strides; ``rank``: the number of leading axes.

    ``early``: the previous launch may still run; nothing is read until it has ended. ``seen``: "" if all keys are
    read, "bounds" if these tell which, and "find" if the bias is read before. ``sink``: there is one more key, with a
    score and no value.
    """
    walked = ["q", "k", "v", "bias", *["sink"] * sink, *["bounds"] * (seen == "bounds")]
    walked += ["out"] * (not split)
    pointers = [*walked, *["sums", "totals", "tops"] * split]
    names = {"pointers": ", ".join(pointers), "numbers": _listed(numbers)}
    names |= {"lead": _lead(rank, walked), "share": _SHARE * split}
    names |= {"part": _LOOK[seen] + _PART * split, "how": _HOW[seen]}
    names |= {"sink": _SINK % {"first": _FIRST * split} if sink else ""}
    text = _VISIT + _FIND * (seen == "find") + _KERNEL % (names | _around(early))
    return _IMPORTS + EARLY * early + text + (_LEFT if split else _WHOLE)


_LOOK = {"": "", "bounds": _KNOWN + _SEEN, "find": _FOUND + _SEEN}
_HOW = {
    "": "",
    "bounds": " ROWS: tl.constexpr,",
    "find": " ROWS: tl.constexpr, CHUNK: tl.constexpr,\n    NEVER: tl.constexpr, SEEN: tl.constexpr,",
}


def combine_text(numbers: Sequence[str], rank: int, early: bool) -> str:
    """The kernel that combines the partial results of a split attention."""
    names = {"numbers": _listed(numbers), "lead": _lead(rank, ("out",))}
    return _IMPORTS + EARLY * early + _COMBINE % (names | _around(early))


def bounds_text(numbers: Sequence[str], rank: int, early: bool) -> str:
    """The kernel that finds which keys queries see; ``rank``: the number of leading axes along which they differ."""
    names = {"numbers": _listed(numbers), "lead": _lead(rank, ("bias",)), "found": _FOUND}
    return _IMPORTS + EARLY * early + _FIND + _BOUNDS % (names | _around(early))


def _around(early: bool) -> dict[str, str]:
    launch, wait = "    gdc_launch_dependents()\n", "    gdc_wait()\n"
    return {"launch": launch * early, "wait": wait * early}


def _listed(numbers: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in numbers)


def _lead(rank: int, pointers: Sequence[str]) -> str:
    """Move ``pointers`` along the leading axes; ``rest`` is the flat index over these axes."""
    lines = []
    for axis in reversed(range(rank)):
        if axis:
            lines += [f"size = tl.cast(N{axis}, tl.int32)", "at = (rest % size).to(tl.int64)"]
        else:
            lines += ["at = rest.to(tl.int64)"]
        moved = {p: f"at * {p.upper()}_{axis}" for p in pointers}
        if "bias" in moved:  # tell the compiler its alignment, so that loads are vectors
            moved["bias"] += " // EVEN * EVEN"
        lines += [f"{p} += {by}" for p, by in moved.items()]
        lines += ["rest = rest // size"] if axis else []
    return "".join(f"    {line}\n" for line in lines)

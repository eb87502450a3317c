# SPDX-License-Identifier: Apache-2.0
"""The Triton text of a product x @ w.T and its epilogue.

A program computes BLOCK_M x BLOCK_N of the result over its share of the depth, BLOCK_K at a time. GROUP
rows of blocks run together, so that they share data in the L2 cache. Rows and columns past the end repeat
the last ones and are not written.

With SPLIT > 1, programs split the depth of a block (split-K). Each writes its sums to memory; the last to
arrive adds them in a fixed order, so that results are deterministic, continues alone, and resets the counter.
"""

from dataclasses import dataclass

from blade.backends.disc.gpu.emit.device_functions import EARLY, called, sources
from blade.backends.disc.gpu.gemm import conv_as_gemm as window

_IMPORTS = "import triton\nimport triton.language as tl\n"
_LIBDEVICE = "from triton.language.extra.cuda import libdevice\n"
_TEXT = """\
@triton.jit
def kernel(
    %(names)s,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr,
):
%(depth)s    height = tl.cast(M, tl.int32)
    across = tl.cdiv(height, BLOCK_M)
    down = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    group = tile // (GROUP * down)
    within = tile %% (GROUP * down)
    taken = tl.minimum(across - group * GROUP, GROUP)
    block_m = group * GROUP + within %% taken
    block_n = within // taken
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(rows, height - 1).to(tl.int64)
    beside = columns.to(tl.int64)
    if not EVEN_N:
        beside = tl.minimum(columns, N - 1).to(tl.int64)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    depth = part * steps * BLOCK_K + tl.arange(0, BLOCK_K)
%(start)s    w_at = w + beside[None, :] * W_N + depth[:, None].to(tl.int64) * W_K
%(begin)s    acc = tl.zeros((BLOCK_M, BLOCK_N), %(sums)s)
    for step in range(0, steps):
%(step)s        acc = tl.dot(a, b, acc, %(how)s)
        %(walked)s
        w_at += BLOCK_K * W_K
"""

_START = """\
    x_at = x + near[:, None] * X_ROW + depth[None, :].to(tl.int64) * X_K
"""

_STEP = """\
        if EVEN_K:
            a = tl.load(x_at)
            b = tl.load(w_at)
        else:
            left = K - step * BLOCK_K
            a = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
            b = tl.load(w_at, mask=depth[:, None] < left, other=0.0)
"""

_PREFETCH = """\
@triton.jit
def prefetch(lines):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
    )


"""

_SPLIT = """\
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = partial + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N) + inside
    tl.store(sums + part * (BLOCK_M * BLOCK_N), acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT - 1:
        tl.store(counters + tile, 0)
        acc = tl.load(sums, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(sums + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
"""


_BEGIN = """\
    gdc_launch_dependents()
    line = tl.minimum(part * steps * BLOCK_K + tl.arange(0, LINES) * LINE, K - 1)
    prefetch(w + beside[:, None] * W_N + line[None, :].to(tl.int64) * W_K)
    gdc_wait()
"""


@dataclass(frozen=True)
class GemmForm:
    """What changes the text of a product.

    ``split``: programs share the depth. ``early``: the previous launch may still run; weights, which it does not
    write, are prefetched before the wait. ``windowed``: rows of x are windows (conv_as_gemm.py). ``integers``:
    operands are bytes, with exact sums. ``any_depth``: the depth is passed as an int64.
    """

    split: bool
    early: bool
    windowed: bool
    integers: bool
    any_depth: bool


def gemm_text(names: list[str], epilogue: str, form: GemmForm) -> str:
    """The module; ``names``: the pointers, sizes and strides; ``epilogue``: its lines, indented."""
    head = head_of(epilogue, form.early) + (_PREFETCH if form.early else "")
    body = _TEXT % {
        "names": ", ".join(names),
        "begin": _BEGIN if form.early else "",
        "depth": "    K = tl.cast(K, tl.int32)\n" if form.any_depth else "",
        "start": window.START if form.windowed else _START,
        "step": window.STEP if form.windowed else _STEP,
        "walked": "first += BLOCK_K" if form.windowed else "x_at += BLOCK_K * X_K",
        "sums": "tl.int32" if form.integers else "tl.float32",
        "how": "out_dtype=tl.int32" if form.integers else "input_precision=PRECISION",
    }
    return f"{head}{body}{_SPLIT if form.split else ''}{epilogue}"


def head_of(epilogue: str, early: bool) -> str:
    """The imports and functions of a module that ends with ``epilogue``."""
    functions = sources(called(epilogue))
    imports = _IMPORTS + (_LIBDEVICE if "libdevice." in functions + epilogue else "")
    return f"{imports}{EARLY * early}\n\n{functions}"

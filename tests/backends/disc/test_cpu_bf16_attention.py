# SPDX-License-Identifier: Apache-2.0
"""Generated attention on bfloat16 operands, at many sizes, on every kind of instruction.

Scores and sums are float32. Two roundings to bfloat16 change a result: of the softmax's weights and of the result
itself, each by at most 2**-8; the first is relative to the sum of magnitudes. The rest is far below.
"""

import math

import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.ir.attention import attend
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

F32, BF16 = torch.float32, torch.bfloat16
HEADS, DEPTH, COLUMNS = (sympy.Symbol(f"s{k}", integer=True, nonnegative=True) for k in (3, 4, 5))
SCALE = 0.3
TARGETS = {"host": host(), "plain4": CpuTarget((), 4)}
if {"avx2", "fma"} <= set(host().isa):
    TARGETS["avx2"] = CpuTarget(("avx2", "fma"), 8)
SIZES = (
    *((1, 2, 1, 5, 8, 8), (2, 3, 7, 9, 33, 17), (1, 1, 64, 64, 64, 64), (1, 2, 33, 100, 31, 65)),
    *((1, 2, 40, 1100, 16, 48), (1, 1, 3, 700, 64, 64), (1, 2, 2, 3, 1, 1), (0, 2, 3, 4, 5, 6)),
    *((1, 1, 0, 3, 4, 4), (1, 1, 5, 0, 4, 4), (1, 1, 2, 0, 4, 4), (1, 1, 5, 5, 0, 3)),
    (2, 2, 130, 130, 80, 80),
)
"""Batch, heads, queries, keys, depth of a head, columns of a value."""


def engine_of(
    result: torch.dtype,
    bias: str,
    causal: bool,
    target: CpuTarget,
    undefined: bool = False,
    cap: float = 0.0,
    with_sink: bool = False,
) -> Engine:
    b = new_builder()
    q = add_input(b, (S0, HEADS, S1, DEPTH), BF16)
    k = add_input(b, (S0, HEADS, S2, DEPTH), BF16)
    v = add_input(b, (S0, HEADS, S2, COLUMNS), BF16)
    scores = (S0, HEADS, S1, S2)
    added = None
    if bias == "full":
        added = add_input(b, scores)
    if bias == "by key":
        mask = add_input(b, (S0, S2), BF16)
        added = b.make("broadcast", (mask,), scores, BF16, axes=(0, 3))
    sink = b.broadcast(add_input(b, (HEADS, 1, 1)), (S0, HEADS, 1, 1)) if with_sink else None
    y = attend(b, q, k, v, added, SCALE, causal, undefined, cap=cap, sink=sink)
    if result == F32:
        inner = y.args[0]
        made = b.make("attention", inner.args, inner.shape, F32, **inner.attrs)
        y = b.permute(made, y.attrs["perm"])
    return compile_to_engine(finish(b, b.make("cast", [y], y.shape, result)), target)


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(
    engine: Engine,
    sizes: tuple[int, ...],
    bias: str,
    causal: bool,
    allowed: float,
    cap: float = math.inf,
    with_sink: bool = False,
) -> None:
    batch, heads, queries, keys, depth, columns = sizes
    q, k = numbers(batch, heads, queries, depth), numbers(batch, heads, keys, depth)
    v = numbers(batch, heads, keys, columns)
    added = {
        "": [],
        "full": [numbers(batch, heads, queries, keys, dtype=F32)],
        "by key": [numbers(batch, keys)],
    }[bias]
    sinks = [numbers(heads, 1, 1, dtype=F32) * 3] * with_sink
    [got] = engine.try_execute([q, k, v, *added, *sinks]) or pytest.fail(engine.last_error())
    scores = q.double() @ k.double().mT * SCALE
    scores = scores if cap == math.inf else cap * (scores / cap).tanh()
    for one in added:
        scores = scores + (one if bias == "full" else one[:, None, None]).double()
    if causal:
        future = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if sinks:
        scores = torch.cat([scores, sinks[0].double().expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :keys] if keys else scores[..., :keys]
    exact, magnitude = weights @ v.double(), weights @ v.double().abs()
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= allowed * magnitude + 1e-6).all()), sizes


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("bias", ["", "full", "by key"])
def test_any_size(name: str, bias: str) -> None:
    causal = bias != "full"
    engine = engine_of(BF16, bias, causal, TARGETS[name])
    for sizes in SIZES:
        check(engine, sizes, bias, causal, 2.0**-7)


@pytest.mark.parametrize("bias", ["", "full", "by key"])
def test_capped_scores(bias: str) -> None:
    engine = engine_of(BF16, bias, False, host(), cap=2.0)
    for sizes in SIZES:
        check(engine, sizes, bias, False, 2.0**-7, cap=2.0)


@pytest.mark.parametrize("bias", ["", "full"])
def test_a_key_without_a_value(bias: str) -> None:
    engine = engine_of(BF16, bias, False, host(), with_sink=True)
    for sizes in SIZES:
        check(engine, sizes, bias, False, 2.0**-7, with_sink=True)


def test_a_float32_result_is_rounded_once_less() -> None:
    engine = engine_of(F32, "", False, host())
    for sizes in SIZES:
        check(engine, sizes, "", False, 1.05 * 2.0**-8)


@pytest.mark.parametrize("undefined", [False, True])
def test_rows_without_keys(undefined: bool) -> None:
    """Of the fused op they are zero, of a softmax that is written out NaN."""
    engine = engine_of(BF16, "full", False, host(), undefined)
    for queries in (2, 9):
        q, k, v = (numbers(1, 1, n, 32) for n in (queries, 5, 5))
        bias = torch.zeros(1, 1, queries, 5)
        bias[:, :, 1] = -math.inf
        [got] = engine.try_execute([q, k, v, bias]) or pytest.fail(engine.last_error())
        row = got[0, 0, 1]
        assert bool(row.isnan().all()) if undefined else bool((row == 0).all())
        assert bool(got[0, 0, 0].isfinite().all())


def test_no_row_is_worse_than_eager() -> None:
    """Heads of a joint projection, read in place; eager computes the same in bfloat16."""
    b = new_builder()
    x = b.pointwise("neg", add_input(b, (S0, S1, 3, 2, 64), BF16))
    parts = [b.slice(x, 2, n, 1, 1) for n in range(3)]
    q, k, v = (b.permute(b.reshape(p, (S0, S1, 2, 64)), (0, 2, 1, 3)) for p in parts)
    y = b.permute(attend(b, q, k, v, None, 0.125), (0, 2, 1, 3))
    engine = compile_to_engine(finish(b, b.reshape(y, (S0, S1, 128))))
    for length in (1, 2, 17, 64, 300):
        given = numbers(2, length, 3, 2, 64)
        [got] = engine.try_execute([given]) or pytest.fail(engine.last_error())
        q, k, v = (-given[:, :, n].transpose(1, 2) for n in range(3))
        attention = torch.nn.functional.scaled_dot_product_attention
        exact = attention(q.double(), k.double(), v.double()).transpose(1, 2).flatten(2)
        eager = attention(q, k, v).transpose(1, 2).flatten(2)
        mine, theirs = ((y.double() - exact).abs().mean() for y in (got, eager))
        assert mine <= 1.1 * theirs

# SPDX-License-Identifier: Apache-2.0
"""Attention in training, forward and backward, against autograd in float64: sizes, masks, rows without keys."""

import math
from dataclasses import dataclass

import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.cpu.attention.block import BLOCK_KEYS
from blade.backends.disc.cpu.attention.gradient import BLOCK
from blade.backends.disc.ir.flash_attention import attend_and_sum, attention_gradient
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")
F32 = torch.float32
H = sympy.Symbol("s3", integer=True, nonnegative=True)
SIZES = [  # batch, heads, queries, keys
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (1, 2, 16, 16),
    (1, 2, 17, 33),
    (2, 1, 49, 50),
    (1, 1, BLOCK + 1, 2 * BLOCK + 3),
    (1, 2, 40, BLOCK_KEYS + 1),
    (1, 1, 2 * BLOCK, 5),
    (0, 1, 2, 3),
    (1, 0, 2, 3),
]


@dataclass(frozen=True)
class Case:
    depth: int
    columns: int
    bias: str = ""  # the axes of the scores that it has, as letters
    causal: bool = False


CASES = [
    Case(64, 64),
    Case(8, 8, causal=True),
    Case(32, 32, "bk"),
    Case(33, 40, "bhqk", causal=True),
    Case(16, 48, "qk"),
    Case(7, 5, "bq"),
]


def heads_last(b: IrBuilder, length: sympy.Symbol, depth: int) -> Value:
    """As a projection leaves it: heads within the row of a place."""
    return b.permute(add_input(b, (S0, length, H, depth)), (0, 2, 1, 3))


def graph_of(case: Case) -> Graph:
    b = new_builder()
    g, q = heads_last(b, S1, case.columns), heads_last(b, S1, case.depth)
    k, v = heads_last(b, S2, case.depth), heads_last(b, S2, case.columns)
    bias = None
    if case.bias:
        sizes = dict(zip("bhqk", (S0, H, S1, S2), strict=True))
        given = add_input(b, [sizes[a] for a in case.bias])
        axes = tuple("bhqk".index(a) for a in case.bias)
        bias = b.make("broadcast", (given,), tuple(sizes.values()), F32, axes=axes)
    scale = 1 / math.sqrt(case.depth)
    y, logs = attend_and_sum(b, q, k, v, bias, scale, case.causal)
    delta = b.reshape(b.reduce("sum", b.pointwise("mul", g, y), (3,)), logs.shape)
    found = attention_gradient(b, g, (q, k, v), logs, delta, bias, scale, case.causal)
    return finish(b, y, logs, *found)


def inputs(case: Case, batch: int, heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    widths = (case.columns, case.depth, case.depth, case.columns)
    lengths = (queries, queries, keys, keys)
    given = [torch.randn(batch, n, heads, d) for n, d in zip(lengths, widths, strict=True)]
    if case.bias:
        sizes = dict(zip("bhqk", (batch, heads, queries, keys), strict=True))
        mask = torch.randn([sizes[a] for a in case.bias])
        given.append(mask.masked_fill(mask > 1.2, -math.inf))
    return given


def reference(case: Case, given: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """By autograd. A row without keys has no weights, no gradient, and -inf for a logarithm."""
    g, q, k, v = (x.to(dtype).transpose(1, 2).detach().clone() for x in given[:4])
    for x in (q, k, v):
        x.requires_grad_()
    scores = q @ k.mT / math.sqrt(case.depth)
    if case.bias:
        shape = [n if a in case.bias else 1 for a, n in zip("bhqk", scores.shape, strict=True)]
        scores = scores + given[4].to(dtype).reshape(shape)
    if case.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    logs = torch.where(empty, 0.0, scores).logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    weights = torch.where(empty, 0.0, scores).softmax(-1).masked_fill(empty, 0.0)
    y = weights @ v
    return [y.detach(), logs.detach(), *torch.autograd.grad(y, (q, k, v), g)]


def run(engine: Engine, given: list[torch.Tensor]) -> list[torch.Tensor]:
    found = engine.try_execute(given)
    assert found is not None, engine.last_error()
    return found


def close(case: Case, given: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """No further from float64 than a few times what autograd in float32 is.

    A slope is the difference of two sums of products of g and v; their rounding is multiplied by q or k.
    """
    near, exact = (reference(case, given, dtype) for dtype in (F32, torch.double))
    g, q, k, v = (x.transpose(1, 2).abs() for x in given[:4])
    products = (
        (g @ v.mT).amax() * max(q.amax(), k.amax()) / math.sqrt(case.depth) if g.numel() else 0
    )
    for x, y, z in zip(found, near, exact, strict=True):
        assert x.shape == z.shape and x.dtype == F32
        assert torch.equal(x.isfinite(), z.isfinite())
        if x.numel():
            x, y, z = (t.nan_to_num(neginf=0.0) for t in (x, y, z))
            allowed = 4 * (y - z).abs().max() + 2.0**-21 * max(1.0, products, z.abs().max())
            assert (x - z).abs().max() <= allowed


@pytest.mark.parametrize(
    ("lanes", "case"),
    [(host().lanes, c) for c in CASES] + [(n, c) for n in (4, 8, 16) for c in CASES[3:5]],
    ids=str,
)
def test_against_autograd_in_float64(lanes: int, case: Case) -> None:
    torch.manual_seed(case.depth + lanes)
    engine = compile_to_engine(graph_of(case), CpuTarget(host().isa, lanes))
    program = engine.program()
    assert "kernel attention_f32_logs " in program and "kernel attention_f32_gradient " in program
    assert "call " not in program
    for size in SIZES:
        given = inputs(case, *size)
        close(case, given, run(engine, given))


def test_interpreter_agrees() -> None:
    case = Case(16, 8, "bhqk", causal=True)
    graph, engine = graph_of(case), compile_to_engine(graph_of(case))
    for size in SIZES:
        given = inputs(case, *size)
        if given[4].numel() and size[2] > 2:
            given[4][:, :, 2] = -math.inf
        want = interpret(graph, given)
        for x, y in zip(run(engine, given), want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        if given[4].numel() and size[2] > 2:
            assert (want[0][:, :, 2] == 0).all() and (want[1][:, :, 2] == -math.inf).all()


def test_keys_behind_all_queries_have_no_gradient() -> None:
    case = Case(8, 8, causal=True)
    given = inputs(case, 1, 2, 3, 5 * BLOCK)
    dk, dv = run(compile_to_engine(graph_of(case)), given)[3:]
    assert (dk[:, :, 3:] == 0).all() and (dv[:, :, 3:] == 0).all()
    assert (dv[:, :, :3] != 0).any()

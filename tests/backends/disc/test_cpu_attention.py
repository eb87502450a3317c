# SPDX-License-Identifier: Apache-2.0
"""The generated attention against torch in float64: sizes, masks, strides, groups of heads, rows without keys."""

import math
from dataclasses import dataclass

import pytest
import sympy
import torch
import torch.nn.functional as F
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.cpu.attention.block import BLOCK_KEYS
from blade.backends.disc.cpu.attention.kernel import FEW, PACKED_KEYS
from blade.backends.disc.ir.attention import attend, grouped
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
    (1, 1, 33, BLOCK_KEYS + 1),
    (2, 1, 70, PACKED_KEYS[0]),
    (1, 1, 34, PACKED_KEYS[1] + 1),
    (1, 2, FEW, 2 * BLOCK_KEYS),
    (1, 1, FEW + 1, 3),
    (0, 1, 2, 3),
    (1, 0, 2, 3),
    (1, 2, 0, 3),
    (1, 2, 6, 0),
    (1, 2, 1, 0),
]


@dataclass(frozen=True)
class Case:
    depth: int
    columns: int
    bias: str = ""  # "", "full", "keys", "heads"
    causal: bool = False
    undefined: bool = False
    cap: float = 0.0
    fill: float | None = None
    sink: bool = False


def graph_of(case: Case) -> Graph:
    b = new_builder()
    q = add_input(b, (S0, H, S1, case.depth))
    k, v = add_input(b, (S0, H, S2, case.depth)), add_input(b, (S0, H, S2, case.columns))
    bias = None
    if case.bias:
        axes = {"full": (0, 1, 2, 3), "keys": (0, 3), "heads": (1, 2, 3)}[case.bias]
        shape = (S0, H, S1, S2)
        given = add_input(b, [shape[a] for a in axes])
        bias = b.make("broadcast", (given,), shape, F32, axes=axes)
    scale = 1 / math.sqrt(case.depth)
    sink = b.broadcast(add_input(b, (H, 1, 1)), (S0, H, 1, 1)) if case.sink else None
    more = {"cap": case.cap, "fill": case.fill, "sink": sink}
    y = attend(b, q, k, v, bias, scale, case.causal, case.undefined, **more)
    return finish(b, y)


def inputs(case: Case, batch: int, heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    q, k = (
        torch.randn(batch, heads, queries, case.depth),
        torch.randn(batch, heads, keys, case.depth),
    )
    given = [q, k, torch.randn(batch, heads, keys, case.columns)]
    if case.bias:
        full = {"full": (batch, heads, queries, keys), "keys": (batch, keys)}
        mask = torch.randn(full.get(case.bias, (heads, queries, keys)))
        mask[mask > 1.2] = -math.inf if case.fill is None else case.fill
        given.append(mask)
    if case.sink:
        given.append(torch.randn(heads, 1, 1) * 3)
    return given


def reference(case: Case, given: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    q, k, v = (x.to(dtype) for x in given[:3])
    mask = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=dtype)
    if case.bias:
        bias = given[3].to(dtype)
        mask = mask + (bias[:, None, None] if case.bias == "keys" else bias)
    if case.causal:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        mask = mask.masked_fill(future, -math.inf)
    if (
        not q.numel() or not k.numel()
    ):  # some versions of torch's own kernel divide by the number of keys
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, mask)


def close(found: torch.Tensor, near: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from float64 than a few times what torch's own float32 is."""
    assert found.shape == exact.shape and found.dtype == F32
    assert torch.equal(found.isnan(), exact.isnan())
    if found.numel():
        allowed = 3 * (near - exact).abs().nan_to_num().max() + 2.0**-21
        assert (found - exact).abs().nan_to_num().max() <= allowed


def run(engine: Engine, given: list[torch.Tensor]) -> torch.Tensor:
    [found] = engine.try_execute(given) or pytest.fail(engine.last_error())
    return found


CASES = [
    Case(64, 64),
    Case(32, 32, "keys"),
    Case(128, 16, causal=True),
    Case(33, 40, "full", causal=True),
    Case(80, 80, "heads"),
    Case(7, 5, "full"),
]


@pytest.mark.parametrize(
    ("lanes", "case"),
    [(host().lanes, c) for c in CASES] + [(n, c) for n in (4, 8, 16) for c in CASES[3:]],
    ids=str,
)
def test_against_float64(lanes: int, case: Case) -> None:
    torch.manual_seed(case.depth + lanes)
    engine = compile_to_engine(graph_of(case), CpuTarget(host().isa, lanes))
    assert "kernel attention_f32 " in engine.program() and "call " not in engine.program()
    for size in SIZES:
        given = inputs(case, *size)
        close(run(engine, given), reference(case, given, F32), reference(case, given, torch.double))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("undefined", [False, True])
def test_interpreter_agrees(causal: bool, undefined: bool) -> None:
    """Rows without a key too: 0 as torch's fused op has it, or NaN as a softmax written out."""
    case = Case(16, 16, "full", causal, undefined)
    graph, engine = graph_of(case), compile_to_engine(graph_of(case))
    for size in SIZES:
        given = inputs(case, *size)
        mask = given[3]
        if mask.numel() and size[2] > 2:
            mask[..., 2, :] = -math.inf
        [want] = interpret(graph, given)
        torch.testing.assert_close(run(engine, given), want, rtol=0, atol=5e-6, equal_nan=True)
        if mask.numel() and size[2] > 2:
            row = want[..., 2, :]
            assert row.isnan().all() if undefined else (row == 0).all()


@pytest.mark.parametrize("fill", [None, -math.inf, -1e9, torch.finfo(F32).min])
@pytest.mark.parametrize("bias", ["full", "keys", "heads"])
def test_capped_and_filled(bias: str, fill: float | None) -> None:
    case = Case(16, 16, bias, causal=bias == "heads", cap=0.75, fill=fill)
    graph, engine = graph_of(case), compile_to_engine(graph_of(case))
    for size in SIZES:
        given = inputs(case, *size)
        if fill is not None and size[3] > 1 and bias == "keys":
            given[1][..., 1, :] = math.nan  # of a key that no query sees
            given[3][..., 1] = fill
        [want] = interpret(graph, given)
        torch.testing.assert_close(run(engine, given), want, rtol=0, atol=5e-6, equal_nan=True)
        if fill not in (None, -math.inf) and size[3] > 1:
            assert not want.isnan().any()


@pytest.mark.parametrize("bias", ["", "full"])
def test_a_key_without_a_value(bias: str) -> None:
    """Also one that has all weight, or none."""
    case = Case(16, 16, bias, causal=not bias, undefined=True, sink=True)
    graph, engine = graph_of(case), compile_to_engine(graph_of(case))
    for size in SIZES:
        for sink in (None, 1e4, *[-math.inf, math.nan] * (size[3] > 0)):
            given = inputs(case, *size)
            if sink is not None:
                given[-1][:1] = sink
            if bias and size[2] > 2:
                given[3][..., 2, :] = -math.inf
            [want] = interpret(graph, given)
            torch.testing.assert_close(run(engine, given), want, rtol=0, atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("queries", [1, 9])
def test_sinks_of_heads_that_share_keys(queries: int) -> None:
    b = new_builder()
    q, k, v = (heads_last(b, n, 16, s) for n, s in ((6, S1), (2, S2), (2, S2)))
    sink = b.broadcast(add_input(b, (6, 1, 1)), (S0, 6, 1, 1))
    y = grouped(b, q, k, v, None, 0.25, sink=sink)
    engine = compile_to_engine(finish(b, b.reshape(b.permute(y, (0, 2, 1, 3)), (S0, S1, 96))))
    given = [torch.randn(2, n, m) for n, m in ((queries, 96), (20, 32), (20, 32))]
    given.append(torch.randn(6, 1, 1))
    wide = [x.double().unflatten(-1, (-1, 16)).transpose(1, 2) for x in given[:3]]
    keys, values = (x.repeat_interleave(3, 1) for x in wide[1:])
    scores = wide[0] @ keys.mT * 0.25
    ends = given[3].double().expand(2, 6, queries, 1)
    want = (torch.cat([scores, ends], -1).softmax(-1)[..., :-1] @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(run(engine, given).double(), want, rtol=2e-6, atol=2e-6)


def test_a_cap_without_a_bias() -> None:
    case = Case(16, 16, cap=1.5)
    graph, engine = graph_of(case), compile_to_engine(graph_of(case))
    for size in SIZES:
        given = inputs(case, *size)
        [want] = interpret(graph, given)
        torch.testing.assert_close(run(engine, given), want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("queries", [2, 7])
def test_lowest_number_is_not_minus_infinity(queries: int) -> None:
    """A row whose every key has the lowest number added is an average of all of them."""
    engine = compile_to_engine(graph_of(Case(8, 8, "full")))
    given = inputs(Case(8, 8, "full"), 1, 2, queries, 9)
    given[3].fill_(torch.finfo(F32).min)
    want = given[2].mean(-2, keepdim=True).expand(1, 2, queries, 8)
    torch.testing.assert_close(run(engine, given), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("queries", [2, 20])
def test_nan_stays_in_its_row(queries: int) -> None:
    case = Case(24, 24)
    engine, given = compile_to_engine(graph_of(case)), inputs(case, 1, 2, queries, 600)
    given[0][0, 1, 1, 3] = math.nan
    found = run(engine, given)
    close(found, reference(case, given, F32), reference(case, given, torch.double))
    assert found[0, 1, 1].isnan().all() and found.isnan().sum() == 24


def test_large_scores_do_not_overflow() -> None:
    case = Case(16, 16)
    given = inputs(case, 1, 1, 30, 700)
    given[0].mul_(300)
    found = run(compile_to_engine(graph_of(case)), given)
    exact = reference(case, given, torch.double)
    near = reference(case, given, F32)
    assert (found - exact).abs().max() <= 4 * (near - exact).abs().max()


def heads_last(b: IrBuilder, heads: int, depth: int, length: sympy.Symbol) -> Value:
    """What a projection leaves: [B, L, H * D], seen as [B, H, L, D]."""
    x = add_input(b, (S0, length, heads * depth))
    return b.permute(b.reshape(x, (S0, length, heads, depth)), (0, 2, 1, 3))


def test_projections_are_read_in_place_and_the_result_is_a_view() -> None:
    b = new_builder()
    q, k, v = (heads_last(b, 3, 20, s) for s in (S1, S2, S2))
    y = attend(b, q, k, v, None, 0.25)
    engine = compile_to_engine(finish(b, b.reshape(b.permute(y, (0, 2, 1, 3)), (S0, S1, 60))))
    assert engine.program().count("\nkernel ") == 1
    for batch, queries, keys in ((2, 5, 40), (1, 1, 9), (3, 40, 5)):
        given = [torch.randn(batch, n, 60) for n in (queries, keys, keys)]
        q3, k3, v3 = (x.double().unflatten(-1, (3, 20)).transpose(1, 2) for x in given)
        want = F.scaled_dot_product_attention(q3, k3, v3, scale=0.25)
        want = want.transpose(1, 2).flatten(2)
        torch.testing.assert_close(run(engine, given).double(), want, rtol=2e-6, atol=2e-6)


def test_rows_that_are_not_adjacent_are_copied() -> None:
    b = new_builder()
    q = add_input(b, (S0, S1, 8))
    k, v = add_input(b, (S0, 8, S2)), add_input(b, (S0, S2, 8))
    y = attend(b, q, b.permute(k, (0, 2, 1)), v, None, 1.0)
    engine = compile_to_engine(finish(b, y))
    given = [torch.randn(2, 6, 8), torch.randn(2, 8, 10), torch.randn(2, 10, 8)]
    want = (given[0] @ given[1]).softmax(-1) @ given[2]
    torch.testing.assert_close(run(engine, given), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads_differ", [False, True])
def test_groups_of_heads_repeat_nothing(heads_differ: bool) -> None:
    b = new_builder()
    q, k, v = (
        heads_last(b, 6, 16, S1),
        heads_last(b, 2, 16, S2),
        heads_last(b, 2, 16, S2),
    )
    given_bias = add_input(b, (6, S1, S2) if heads_differ else (S1, S2))
    bias = b.broadcast(given_bias, (S0, 6, S1, S2))
    y = grouped(b, q, k, v, bias, 0.25)
    engine = compile_to_engine(finish(b, b.reshape(b.permute(y, (0, 2, 1, 3)), (S0, S1, 96))))
    assert engine.program().count("\nkernel ") == 1
    for batch, queries, keys in ((2, 5, 40), (1, 1, 9), (3, 40, 5)):
        given = [torch.randn(batch, queries, 96)]
        given += [torch.randn(batch, keys, 32) for _ in range(2)]
        given.append(torch.randn([6] * heads_differ + [queries, keys]))
        q3, k3, v3 = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in given[:3])
        want = F.scaled_dot_product_attention(q3, k3, v3, given[3], scale=0.25, enable_gqa=True)
        found = run(engine, given)
        torch.testing.assert_close(found, want.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)

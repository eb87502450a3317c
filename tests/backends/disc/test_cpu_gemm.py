# SPDX-License-Identifier: Apache-2.0
"""The generated GEMM against torch, through whole programs: edges of every kind, packed weights."""

import hypothesis.strategies as st
import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder
from hypothesis import given, settings

from blade.backends.disc.cpu.gemm.gemm import BLOCK_DEPTH, MANY_ROWS
from blade.backends.disc.cpu.gemm.micro_kernel import gemm_tiling
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine, renew

pytestmark = pytest.mark.needs("torch_mlir")


def linear_engine(
    weight: torch.Tensor, bias: torch.Tensor | None, target: CpuTarget | None = None
) -> Engine:
    """x [s0, s1, k] -> x @ weight.T + bias."""
    b = new_builder()
    x = add_input(b, (S0, S1, weight.shape[1]), weight.dtype)
    constants = [weight] if bias is None else [weight, bias]
    operands: list[Value] = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    y = b.make("linear", (x, *operands), (S0, S1, weight.shape[0]), weight.dtype)
    return compile_to_engine(finish(b, y, constants=constants), target)


def check(engine: Engine, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
    """Every element within the bound of Higham, "Accuracy and Stability", section 3.1.

    A sum of k fused products in parts of at most d is off by at most gamma(d + parts) times the sum of
    the magnitudes, gamma(j) = j u / (1 - j u), in whatever order each part is summed. The reference, in
    fp64, is off by gamma(k + 1) of its own.
    """
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, weight.shape[1], generator=generator, dtype=weight.dtype)
    [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
    given_bias = torch.zeros(len(weight)) if bias is None else bias
    exact = x.double() @ weight.double().t() + given_bias
    magnitude = x.double().abs() @ weight.double().abs().t() + given_bias.abs()
    depth = weight.shape[1]
    parts = min(depth, BLOCK_DEPTH) + -(-depth // BLOCK_DEPTH) + 1
    allowed = gamma(parts, weight.dtype) + gamma(depth + 1, torch.float64)
    assert found.shape == exact.shape and found.dtype == weight.dtype
    assert bool(((found - exact).abs() <= allowed * magnitude).all())


def gamma(roundings: int, dtype: torch.dtype) -> float:
    error = roundings * torch.finfo(dtype).eps / 2
    return error / (1 - error)


ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 47, 48, 49, 97, 191, 193, 400)


@given(
    columns=st.sampled_from([1, 7, 16, 17, 48, 63, 64, 65, 100, 130]),
    depth=st.sampled_from([1, 2, 5, 64, 383, 385, 900]),
    with_bias=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_any_size(columns: int, depth: int, with_bias: bool, transposed: bool) -> None:
    torch.manual_seed(columns * 1000 + depth)
    weight = torch.randn(depth, columns).t() if transposed else torch.randn(columns, depth)
    bias = torch.randn(columns) if with_bias else None
    engine = linear_engine(weight, bias)
    assert "kernel gemm_f32" in engine.program()
    for rows in ROWS:
        check(engine, weight, bias, rows)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rest", [0, 1, 2, 3, 4])
def test_every_tile(lanes: int, rest: int) -> None:
    """The tiles of SSE or NEON, AVX2 and AVX-512, on whatever runs this (LLVM splits or joins vectors)."""
    torch.manual_seed(lanes + rest)
    columns = 2 * gemm_tiling(CpuTarget(host().isa, lanes)).width + max(0, rest * lanes - 1)
    weight, bias = torch.randn(columns, 33), torch.randn(columns)
    engine = linear_engine(weight, bias, CpuTarget(host().isa, lanes))
    for rows in range(1, 14):
        check(engine, weight, bias, rows)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_double(lanes: int) -> None:
    torch.manual_seed(lanes)
    weight = torch.randn(83, 500, dtype=torch.float64)
    bias = torch.randn(83, dtype=torch.float64)
    engine = linear_engine(weight, bias, CpuTarget(host().isa, lanes))
    assert "kernel gemm_f64" in engine.program()
    for rows in (0, 1, 2, 5, 12, 100):
        check(engine, weight, bias, rows)


def test_a_run_of_units_is_any_run() -> None:
    """However units are split between threads, every element is computed."""
    torch.manual_seed(5)
    weight, bias = torch.randn(200, 40), torch.randn(200)
    engine = linear_engine(weight, bias)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            check(engine, weight, bias, MANY_ROWS - 9)
            check(engine, weight, bias, MANY_ROWS + 75)
    finally:
        torch.set_num_threads(threads)


def test_rows_at_a_distance() -> None:
    """The first token of each sequence, as poolers take it: rows lie s1 * 8 apart."""
    torch.manual_seed(3)
    b = new_builder()
    x = add_input(b, (S0, S1, 8))
    weight = torch.randn(24, 8)
    w = b.make("const", (), weight.shape, weight.dtype, tuple(weight.stride()), index=0)
    first = b.reshape(b.slice(x, 1, 0, 1, 1), (S0, 8))
    engine = compile_to_engine(
        finish(b, b.make("linear", (first, w), (S0, 24), torch.float32), constants=[weight])
    )
    assert "kernel gemm_f32" in engine.program()
    for batch, length in ((1, 1), (5, 3), (3, 40)):
        given_x = torch.randn(batch, length, 8)
        [found] = engine.try_execute([given_x]) or pytest.fail(engine.last_error())
        torch.testing.assert_close(found, given_x[:, 0] @ weight.t(), rtol=1e-5, atol=1e-5)


def test_weights_of_several_constants() -> None:
    """Projections merged side by side: nothing is concatenated at run time."""
    torch.manual_seed(0)
    weights = [torch.randn(40, 24), torch.randn(24, 7).t(), torch.randn(30, 24)[5:22]]
    biases = [torch.randn(40), torch.zeros(7), torch.randn(34)[::2]]
    constants = [weights[0], weights[1].t(), torch.randn(30, 24), biases[0], biases[2]]
    b = new_builder()
    x = add_input(b, (S0, 24))
    const = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    weights[2] = constants[2][5:22]
    parts = [const[0], b.permute(const[1], (1, 0)), b.slice(const[2], 0, 5, 1, 17)]
    w = b.make("concat", parts, (64, 24), torch.float32, axis=0)
    none = b.fill(0, (7,), torch.float32)
    bias = b.make("concat", (const[3], none, const[4]), (64,), torch.float32, axis=0)
    y = b.make("linear", (x, w, bias), (S0, 64), torch.float32)
    engine = compile_to_engine(finish(b, y, constants=constants))
    assert engine.program().count("\nkernel ") == 1
    for rows in (1, 5, 30):
        given_x = torch.randn(rows, 24)
        [found] = engine.try_execute([given_x]) or pytest.fail(engine.last_error())
        want = torch.nn.functional.linear(given_x, torch.cat(weights), torch.cat(biases))
        torch.testing.assert_close(found, want)
    with torch.no_grad():
        constants[4].add_(2)
    [found] = engine.try_execute([given_x]) or pytest.fail(engine.last_error())
    torch.testing.assert_close(
        found, torch.nn.functional.linear(given_x, torch.cat(weights), torch.cat(biases))
    )


def test_weights_written_in_place_are_packed_again() -> None:
    torch.manual_seed(1)
    weight = torch.randn(32, 16)
    engine = linear_engine(weight, None)
    check(engine, weight, None, 9)
    with torch.no_grad():
        weight.mul_(-3)
    check(engine, weight, None, 9)


def test_a_renewed_engine_keeps_what_it_packed() -> None:
    torch.manual_seed(1)
    weight = torch.randn(32, 16)
    engine = linear_engine(weight, None)
    check(engine, weight, None, 9)  # the first call packs
    before = weight.clone()
    weight.data.mul_(-3)  # noted nowhere: only packing once more would show it
    renew(engine)
    check(engine, before, None, 9)
    with torch.no_grad():
        weight.mul_(2)
    check(engine, weight, None, 9)


def test_nan_and_infinity_pass_through() -> None:
    torch.manual_seed(2)
    weight = torch.randn(16, 8)
    engine = linear_engine(weight, None)
    x = torch.randn(1, 7, 8)
    x[0, 2, 3], x[0, 4, 1] = float("nan"), float("inf")
    [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
    want = x @ weight.t()
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.isinf(), want.isinf())

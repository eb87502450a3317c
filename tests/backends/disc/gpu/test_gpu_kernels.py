# SPDX-License-Identifier: Apache-2.0
"""Whole kernels in Triton's interpreter against the reference: shapes, strides, reductions, several stages."""

import itertools

import pytest
import sympy
import torch
from cpu_native import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    I64,
    REDUCIBLE,
    S0,
    S1,
    S2,
    _args,
    _random,
    gelu,
    kernels,
    layer_norm,
    softmax,
)
from triton_interpreter import TARGET, both, check, run

from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Const,
    Dim,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)

pytestmark = pytest.mark.needs("triton_interpreter")

WIDTHS = (0, 1, 8, 100, 256, 257, 1000, 1025, 4096, 4104, 4501)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", (0, 1, 3))
def test_symbolic_rows(rows: int, width: int) -> None:
    rng, sizes = torch.Generator().manual_seed(width), {"s0": rows, "s1": width}
    count = rows * width
    x, residual, *weights = _random(rng, count, count, width, width, width)
    out = torch.full((count + 20,), 7.0)
    check(softmax(), [x, out], sizes)
    check(gelu(S1), [x, weights[0], out], sizes)
    check(layer_norm(S1), [x, weights[0], residual, *weights[1:], out], sizes)


@pytest.mark.parametrize("width", (1, 5, 24, 384, 768, 1000, 3072))
def test_rows_of_a_constant_length(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x, residual, *weights = _random(rng, 6 * width, 6 * width, width, width, width)
    out = torch.full((6 * width + 20,), 7.0)
    check(layer_norm(width), [x, weights[0], residual, *weights[1:], out], {"s0": 6})
    check(gelu(width), [x, weights[0], out], {"s0": 6})


@pytest.mark.parametrize("dtype", (F64, BF16, F16), ids=str)
def test_softmax_in_other_floats(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    for width in (1, 8, 37, 2000, 5000):
        x = torch.randn(4 * width, generator=rng).to(dtype)
        check(softmax(dtype), [x, torch.zeros(4 * width, dtype=dtype)], {"s0": 4, "s1": width})


@pytest.mark.parametrize("width", (19, 5000))
def test_softmax_of_infinities_and_nan_is_torchs(width: int) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.randn(6, width, generator=torch.Generator().manual_seed(4))
    rows[0] = -inf
    rows[1, 3:] = -inf
    rows[2, 18] = inf
    rows[3, 0] = nan
    rows[4, width - 1] = nan
    out = torch.zeros(6 * width)
    kernel = softmax()
    run(kernel, emit(kernel, TARGET), [rows.flatten(), out], {"s0": 6, "s1": width})
    torch.testing.assert_close(out.view(6, width), rows.softmax(-1), equal_nan=True)


def test_output_in_place_of_an_input() -> None:
    rng = torch.Generator().manual_seed(5)
    kernel = layer_norm(S1, out=2)
    kernel = Kernel(kernel.outer, kernel.inner, kernel.args[:5], kernel.body)
    for width in (8, 45, 5000):
        x, residual, *weights = _random(rng, 4 * width, 4 * width, width, width, width)
        check(kernel, [x, weights[0], residual, *weights[1:]], {"s0": 4, "s1": width})


def test_a_row_value_stored_over_one_that_is_read_waits_for_all_warps() -> None:
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1, 1)), F32),
        Load(Access(1, (1, 0)), F32),
        Compute("add", (0, 1), F32),
        Reduce("sum", 2, F32),
        Store(Access(2, (1, 0)), 3),
    )
    kernel = Kernel((S0,), S1, _args([F32, F32], [F32]), body)
    assert all("debug_barrier" in c.unit.text for c in emit(kernel, TARGET))
    assert not any("debug_barrier" in c.unit.text for c in emit(softmax(), TARGET))
    check(kernel, _random(torch.Generator().manual_seed(1), 35, 5, 5), {"s0": 5, "s1": 7})


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_permuted_and_broadcast_strides(order: tuple[int, ...]) -> None:
    """out[i, j, k] = permuted(x) * y[j] + z[i, k] for every order of x's dimensions."""
    shape, strides = (S0, S1, S2), [sympy.Integer(0)] * 3
    running: Dim = 1
    for d in reversed(order):
        strides[d], running = running, running * shape[d]
    body: tuple[Stmt, ...] = (
        Load(Access(0, tuple(strides), 2), F32),
        Load(Access(1, (0, 1, 0)), F32),
        Load(Access(2, (S2, 0, 1)), F32),
        Compute("fma", (0, 1, 2), F32),
        Store(Access(3, (S1 * S2, S2, 1)), 3),
    )
    kernel = Kernel((S0, S1), S2, _args([F32] * 3, [F32]), body)
    rng = torch.Generator().manual_seed(6)
    for s0, s1, s2 in ((2, 3, 4), (1, 1, 1), (3, 9, 17), (2, 8, 160), (0, 3, 2), (70, 1, 99)):
        buffers = _random(rng, s0 * s1 * s2 + 2, s1, s0 * s2, s0 * s1 * s2 + 9)
        check(kernel, buffers, {"s0": s0, "s1": s1, "s2": s2})


def test_a_strided_store() -> None:
    body: tuple[Stmt, ...] = (Load(Access(0, (S1, 1)), F32), Store(Access(1, (1, S0)), 0))
    kernel = Kernel((S0,), S1, _args([F32], [F32]), body)
    rng = torch.Generator().manual_seed(7)
    for s0, s1 in ((3, 5), (17, 40), (64, 64), (1, 9), (9, 1), (130, 67)):
        check(kernel, _random(rng, s0 * s1, s0 * s1 + 9), {"s0": s0, "s1": s1})


def test_a_transposing_kernel_keeps_its_indices() -> None:
    """out[i, j, k] = x[k, j, i] + 100 i + 10 j + k."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1, S0, S0 * S1)), F32),
        Index(0, F32),
        Index(1, F32),
        Index(2, F32),
        Const(100.0, F32),
        Const(10.0, F32),
        Compute("fma", (1, 4, 0), F32),
        Compute("fma", (2, 5, 6), F32),
        Compute("add", (3, 7), F32),
        Store(Access(1, (S1 * S2, S2, 1)), 8),
    )
    kernel = Kernel((S0, S1), S2, _args([F32], [F32]), body)
    rng = torch.Generator().manual_seed(12)
    for s0, s1, s2 in ((3, 2, 5), (40, 3, 70), (17, 1, 130), (1, 5, 1), (4, 0, 3), (0, 2, 2)):
        buffers = _random(rng, s0 * s1 * s2, s0 * s1 * s2 + 9)
        check(kernel, buffers, {"s0": s0, "s1": s1, "s2": s2})


def test_index_size_and_mixed_types() -> None:
    """Causal mask: x where key <= query, else -inf; a bool mask out, and the row's number of kept keys."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1 * S1, S1, 1)), BF16),
        Index(1, I64),
        Index(2, I64),
        Compute("le", (2, 1), BOOL),
        Const(float("-inf"), BF16),
        Compute("where", (3, 0, 4), BF16),
        Store(Access(1, (S1 * S1, S1, 1)), 5),
        Store(Access(2, (S1 * S1, S1, 1)), 3),
        Compute("cast", (3,), I64),
        Reduce("sum", 8, I64),
        Size(S1 + S0, I64),
        Compute("mul", (9, 10), I64),
        Store(Access(3, (S1, 1, 0)), 11),
    )
    kernel = Kernel((S0, S1), S1, _args([BF16], [BF16, BOOL, I64]), body)
    for s0, s1 in ((2, 1), (2, 9), (1, 32), (3, 13), (1, 270)):
        n = s0 * s1 * s1
        x = torch.randn(n, generator=torch.Generator().manual_seed(9)).bfloat16()
        outs = [torch.zeros(n, dtype=d) for d in (BF16, BOOL)]
        check(kernel, [x, *outs, torch.zeros(s0 * s1, dtype=I64)], {"s0": s0, "s1": s1})


@pytest.mark.parametrize(("kind", "dtype"), REDUCIBLE, ids=str)
def test_every_reduction_and_its_identity(kind: str, dtype: torch.dtype) -> None:
    """In registers, walked, and of rows side by side."""
    layouts = (((S1, 1), (0, 1, 7, 300, 4500)), ((1, S0), (0, 1, 7, 41)))
    for (strides, widths), rows in itertools.product(layouts, (1, 5)):
        body: tuple[Stmt, ...] = (
            Load(Access(0, strides), dtype),
            Reduce(kind, 0, dtype),
            Store(Access(1, (1, 0)), 1),
        )
        kernel = Kernel((S0,), S1, _args([dtype], [dtype]), body)
        for width in widths:
            x = samples(dtype, rows * width, torch.Generator().manual_seed(10))
            if kind == "prod" and dtype.is_floating_point:
                x = x / 4 if width < 50 else x.sign()
            got, want = both(
                kernel, [x, torch.zeros(rows, dtype=dtype)], {"s0": rows, "s1": width}
            )[1]
            # the order of a sum of thousands is the emitter's
            loose = {"rtol": 1e-4, "atol": 1e-3} if kind == "sum" and dtype == F32 else {}
            torch.testing.assert_close(got, want, equal_nan=True, **loose)


@pytest.mark.parametrize("kind", ("max", "min"))
@pytest.mark.parametrize("width", (45, 5000))
def test_max_and_min_propagate_nan_from_any_place(kind: str, width: int) -> None:
    body = (Load(Access(0, (S1, 1)), F32), Reduce(kind, 0, F32), Store(Access(1, (1, 0)), 1))
    kernel = Kernel((S0,), S1, _args([F32], [F32]), body)
    x = torch.randn(45, width, generator=torch.Generator().manual_seed(11))
    x[range(45), torch.arange(45) * (width // 45)] = float("nan")
    out = torch.zeros(45)
    run(kernel, emit(kernel, TARGET), [x.flatten(), out], {"s0": 45, "s1": width})
    assert bool(out.isnan().all())


def test_sums_of_columns_with_other_dimensions() -> None:
    """out[i, k] = sum over j of x[i, j, k] * w[k], k contiguous; the mean of it, too, in a second stage."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1 * S2, 1, S2)), F32),
        Load(Access(1, (0, 1, 0)), F32),
        Compute("mul", (0, 1), F32),
        Reduce("sum", 2, F32),
        Compute("sub", (2, 3), F32),
        Reduce("max", 4, F32),
        Store(Access(2, (S2, 1, 0)), 3),
        Store(Access(3, (S2, 1, 0)), 5),
        Store(Access(4, (S1 * S2, 1, S2)), 4),
    )
    kernel = Kernel((S0, S2), S1, _args([F32] * 2, [F32] * 3), body)
    rng = torch.Generator().manual_seed(13)
    for s0, s1, s2 in ((2, 5, 7), (1, 70, 64), (3, 1, 130), (2, 0, 3), (0, 4, 4)):
        n = s0 * s1 * s2
        buffers = _random(rng, n, s2, s0 * s2, s0 * s2, n)
        check(kernel, buffers, {"s0": s0, "s1": s1, "s2": s2})


@pytest.mark.parametrize("inner", (S2, 8, 768))
def test_rows_of_a_table_chosen_by_an_index(inner: Dim) -> None:
    """An embedding, one row for each token: layer-normalized without weights, and each element by its own index."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1, 1, 0)), I64),
        Gather(Access(1, (0, 0, 1)), 0, inner, F32),
        Reduce("max", 1, F32),
        Compute("sub", (1, 2), F32),
        Store(Access(2, (S1 * inner, inner, 1)), 3),
    )
    kernel = Kernel((S0, S1), inner, _args([I64, F32], [F32]), body)
    rng = torch.Generator().manual_seed(14)
    for s0, s1, s2 in ((2, 3, 5), (1, 9, 300), (3, 1, 2000)):
        width = s2 if inner is S2 else int(inner)
        index = torch.randint(0, 11, (s0 * s1,), generator=rng)
        out = torch.zeros(s0 * s1 * width)
        table = torch.randn(11 * width, generator=rng)
        check(kernel, [index, table, out], {"s0": s0, "s1": s1, "s2": s2})


def test_elements_chosen_by_an_index() -> None:
    """out[i, j] = x[i, index[i, j]]"""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1, 1)), torch.int32),
        Gather(Access(1, (S2, 0)), 0, 1, F16),
        Compute("neg", (1,), F16),
        Store(Access(2, (S1, 1)), 2),
    )
    kernel = Kernel((S0,), S1, _args([torch.int32, F16], [F16]), body)
    rng = torch.Generator().manual_seed(15)
    for s0, s1, s2 in ((2, 3, 5), (9, 130, 17), (1, 1, 1)):
        index = torch.randint(0, s2, (s0 * s1,), generator=rng, dtype=torch.int32)
        x = torch.randn(s0 * s2, generator=rng).half()
        out = torch.zeros(s0 * s1, dtype=F16)
        check(kernel, [index, x, out], {"s0": s0, "s1": s1, "s2": s2})


def test_one_element_a_row_and_steps_of_memory() -> None:
    """Inner of one element stored with stride 0, and every second element read."""
    body: tuple[Stmt, ...] = (Load(Access(0, (2, 1), 1), F32), Store(Access(1, (1, 0)), 0))
    kernel = Kernel((S0,), 1, _args([F32], [F32]), body)
    check(kernel, [torch.randn(2 * 700 + 1), torch.zeros(700)], {"s0": 700})
    body = (Load(Access(0, (S1, 3), 2), F32), Store(Access(1, (S2, 1)), 0))
    kernel = Kernel((S0,), S2, _args([F32], [F32]), body)
    check(kernel, [torch.randn(5 * 900 + 2), torch.zeros(5 * 300)], {"s0": 5, "s1": 900, "s2": 300})


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kernels(), st.integers(0, 2**31))
def test_random_kernels(kernel: Kernel, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for s0, s1, s2 in ((1, 1, 1), (2, 3, 5), (3, 2, 8), (2, 2, 41)):
        buffers = _random(rng, *[s0 * s1 * max(s2, 32) for _ in kernel.args])
        for got, want in both(kernel, buffers, {"s0": s0, "s1": s1, "s2": s2}):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_whole_tensor_is_reduced_by_one_program() -> None:
    """A value of no dimensions: there is one row, whatever its length."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1,)), F32),
        Reduce("max", 0, F32),
        Reduce("sum", 0, F32),
        Compute("sub", (1, 2), F32),
        Store(Access(1, (0,)), 3),
    )
    for inner in (S0, 7, 300, 20000):
        kernel = Kernel((), inner, _args([F32], [F32]), body)
        (choice,) = emit(kernel, TARGET)
        assert choice.grid == (1, 1, 1)
        for s0 in (0, 1, 300, 5000) if inner is S0 else (1,):
            count = s0 if inner is S0 else int(inner)
            x = torch.randn(count, generator=torch.Generator().manual_seed(1)) + 1
            check(kernel, [x, torch.zeros(1)], {"s0": s0})


def test_large_rows_are_counted_in_64_bits() -> None:
    """Offsets of rows go past 2**31 elements: seen in the text, as no test holds so much."""
    kernel = Kernel(
        (S0, S1),
        768,
        (Arg(F16, False), Arg(F16, True)),
        (Load(Access(0, (768 * S1, 768, 1)), F16), Store(Access(1, (768, 768 * S0, 1)), 0)),
    )
    for choice in emit(kernel, TARGET):
        assert "t = tl.program_id(0).to(tl.int64)" in choice.unit.text
        assert "divide(r, n1, " in choice.unit.text

# SPDX-License-Identifier: Apache-2.0
"""Whole kernels as native code against the interpreter: shapes, strides, reductions, several stages."""

import itertools
from collections.abc import Sequence

import pytest
import sympy
import torch
from cpu_native import Native, samples, symbol
from hypothesis import given, settings
from hypothesis import strategies as st

from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Const,
    Dim,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)
from blade.backends.disc.ir.kernel_schedule import schedule_kernel
from blade.backends.disc.target.cpu import CpuTarget, host

pytestmark = pytest.mark.needs("torch_mlir")

F32, F64, BF16, F16, I64, BOOL = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
)
S0, S1, S2 = symbol("s0"), symbol("s1"), symbol("s2")
WIDTHS = (0, 1, 3, 7, 8, 9, 16, 31, 32, 33, 63, 64, 100)


def _args(inputs: Sequence[torch.dtype], outputs: Sequence[torch.dtype]) -> tuple[Arg, ...]:
    return tuple(Arg(d, False) for d in inputs) + tuple(Arg(d, True) for d in outputs)


def softmax(dtype: torch.dtype = F32, inner: Dim = S1) -> Kernel:
    body: tuple[Stmt, ...] = (
        Load(Access(0, (inner, 1)), dtype),
        Reduce("max", 0, dtype),
        Compute("sub", (0, 1), dtype),
        Compute("exp", (2,), dtype),
        Reduce("sum", 3, dtype),
        Compute("div", (3, 4), dtype),
        Store(Access(1, (inner, 1)), 5),
    )
    return Kernel((S0,), inner, _args([dtype], [dtype]), body)


def layer_norm(inner: Dim, out: int = 5) -> Kernel:
    """x + bias + residual, normalized, times weight, plus another bias; written to argument ``out``."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (inner, 1)), F32),
        Load(Access(1, (0, 1)), F32),
        Load(Access(2, (inner, 1)), F32),
        Compute("add", (0, 1), F32),
        Compute("add", (3, 2), F32),
        Size(inner, F32),
        Reduce("sum", 4, F32),
        Compute("div", (6, 5), F32),
        Compute("sub", (4, 7), F32),
        Compute("mul", (8, 8), F32),
        Reduce("sum", 9, F32),
        Compute("div", (10, 5), F32),
        Const(1e-5, F32),
        Compute("add", (11, 12), F32),
        Compute("rsqrt", (13,), F32),
        Compute("mul", (8, 14), F32),
        Load(Access(3, (0, 1)), F32),
        Load(Access(4, (0, 1)), F32),
        Compute("fma", (15, 16, 17), F32),
        Store(Access(out, (inner, 1)), 18),
    )
    return Kernel((S0,), inner, _args([F32] * 5, [F32]), body)


def gelu(inner: Dim) -> Kernel:
    """0.5 x (1 + erf(x / sqrt(2))) of x = a + bias."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (inner, 1)), F32),
        Load(Access(1, (0, 1)), F32),
        Compute("add", (0, 1), F32),
        Const(0.7071067811865476, F32),
        Compute("mul", (2, 3), F32),
        Compute("erf", (4,), F32),
        Const(1.0, F32),
        Compute("add", (5, 6), F32),
        Const(0.5, F32),
        Compute("mul", (2, 8), F32),
        Compute("mul", (9, 7), F32),
        Store(Access(2, (inner, 1)), 10),
    )
    return Kernel((S0,), inner, _args([F32, F32], [F32]), body)


@pytest.fixture(scope="module")
def native() -> Native:
    kernels = {"softmax": softmax(), "layer_norm": layer_norm(S1), "gelu": gelu(S1)}
    kernels |= {f"softmax_{d}".replace("torch.", ""): softmax(d) for d in (F64, BF16, F16)}
    kernels |= {f"fixed_{n}": layer_norm(n) for n in (1, 5, 8, 24, 384)}
    return Native(kernels)


def _random(rng: torch.Generator, *counts: int) -> list[torch.Tensor]:
    return [torch.randn(n, generator=rng) for n in counts]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", (0, 1, 5))
def test_symbolic_rows(native: Native, rows: int, width: int) -> None:
    rng, sizes, count = (
        torch.Generator().manual_seed(width),
        {"s0": rows, "s1": width},
        rows * width,
    )
    x, residual, *weights = _random(rng, count, count, width, width, width)
    out = torch.full((count + 20,), 7.0)
    native.check("softmax", [x, out], sizes, parts=3)
    native.check("gelu", [x, weights[0], out], sizes, parts=2)
    native.check("layer_norm", [x, weights[0], residual, *weights[1:], out], sizes, parts=2)


@pytest.mark.parametrize("lanes", (4, 16))
def test_other_vector_widths(lanes: int) -> None:
    """LLVM splits or widens what the machine does not have: the text for any width runs anywhere."""
    kernels = {"softmax": softmax(), "layer_norm": layer_norm(S1), "fixed": layer_norm(40)}
    native = Native(kernels, CpuTarget(host().isa, lanes))
    rng = torch.Generator().manual_seed(lanes)
    for width in (0, 1, lanes, 40, 67):
        x, residual, *weights = _random(rng, 3 * width, 3 * width, width, width, width)
        sizes, out = {"s0": 3, "s1": width}, torch.zeros(3 * width + 20)
        native.check("softmax", [x, out], sizes)
        norm = [x, weights[0], residual, *weights[1:], out]
        native.check("layer_norm", norm, sizes)
        if width == 40:
            native.check("fixed", norm, sizes)


@pytest.mark.parametrize("width", (1, 5, 8, 24, 384))
def test_rows_of_a_constant_length(native: Native, width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x, residual, *weights = _random(rng, 6 * width, 6 * width, width, width, width)
    out = torch.full((6 * width + 20,), 7.0)
    native.check(f"fixed_{width}", [x, weights[0], residual, *weights[1:], out], {"s0": 6}, parts=2)


@pytest.mark.parametrize("dtype", (F64, BF16, F16), ids=str)
def test_softmax_in_other_floats(native: Native, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    for width in (1, 8, 37):
        x = torch.randn(4 * width, generator=rng).to(dtype)
        name = f"softmax_{dtype}".replace("torch.", "")
        native.check(name, [x, torch.zeros(4 * width, dtype=dtype)], {"s0": 4, "s1": width})


def test_softmax_of_infinities_and_nan_is_torchs(native: Native) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.randn(6, 19, generator=torch.Generator().manual_seed(4))
    rows[0] = -inf
    rows[1, 3:] = -inf
    rows[2, 18] = inf
    rows[3, 0] = nan
    rows[4, 17] = nan
    out = torch.zeros(6 * 19)
    native.run("softmax", [rows.flatten(), out], {"s0": 6, "s1": 19})
    torch.testing.assert_close(out.view(6, 19), rows.softmax(-1), equal_nan=True)


def test_output_in_place_of_an_input() -> None:
    rng = torch.Generator().manual_seed(5)
    kernel = layer_norm(S1, out=2)
    native = Native({"k": Kernel(kernel.outer, kernel.inner, kernel.args[:5], kernel.body)})
    for width in (8, 45):
        x, residual, *weights = _random(rng, 4 * width, 4 * width, width, width, width)
        native.check("k", [x, weights[0], residual, *weights[1:]], {"s0": 4, "s1": width})


def test_softmax_evaluates_the_exponential_once_and_layer_norm_keeps_its_sum() -> None:
    first, second, third = schedule_kernel(softmax()).passes
    assert (first.keep, second.keep, third.reload) == ((), (3,), (3,))
    steps = schedule_kernel(layer_norm(S1)).passes
    assert [s.keep for s in steps] == [(4,), (), ()]
    assert [s.reload for s in steps] == [(), (4,), (4,)]
    assert emit(gelu(S1), "k", host()).scratch == 0


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
    native = Native({"k": Kernel((S0, S1), S2, _args([F32] * 3, [F32]), body)})
    rng = torch.Generator().manual_seed(6)
    for s0, s1, s2 in ((2, 3, 4), (1, 1, 1), (3, 9, 17), (2, 8, 16), (0, 3, 2), (5, 1, 33)):
        buffers = _random(rng, s0 * s1 * s2 + 2, s1, s0 * s2, s0 * s1 * s2 + 9)
        native.check("k", buffers, {"s0": s0, "s1": s1, "s2": s2}, parts=2)


def test_a_strided_store() -> None:
    body: tuple[Stmt, ...] = (Load(Access(0, (S1, 1)), F32), Store(Access(1, (1, S0)), 0))
    native = Native({"k": Kernel((S0,), S1, _args([F32], [F32]), body)})
    rng = torch.Generator().manual_seed(7)
    for s0, s1 in ((3, 5), (17, 40), (64, 64), (1, 9), (9, 1)):
        native.check("k", _random(rng, s0 * s1, s0 * s1 + 9), {"s0": s0, "s1": s1}, parts=3)


def test_a_transposing_kernel_walks_blocks_and_keeps_its_indices() -> None:
    """out[i, j, k] = x[k, j, i] + 100 i + 10 j: x jumps along k, the blocks run along i."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1, S0, S0 * S1)), F32),
        Index(0, F32),
        Index(1, F32),
        Const(100.0, F32),
        Const(10.0, F32),
        Compute("fma", (1, 3, 0), F32),
        Compute("fma", (2, 4, 5), F32),
        Store(Access(1, (S1 * S2, S2, 1)), 6),
    )
    native = Native({"k": Kernel((S0, S1), S2, _args([F32], [F32]), body)})
    rng = torch.Generator().manual_seed(12)
    assert "%group" in native.emitted["k"].text
    for s0, s1, s2 in ((3, 2, 5), (40, 3, 70), (17, 1, 64), (1, 5, 1), (4, 0, 3), (0, 2, 2)):
        count = s0 * s1 * s2
        sizes = {"s0": s0, "s1": s1, "s2": s2}
        native.check("k", _random(rng, count, count + 9), sizes, parts=3)


def test_contiguous_dimensions_become_one() -> None:
    strides = (S1 * S2, S2, 1)
    body: tuple[Stmt, ...] = (
        Load(Access(0, strides), F32),
        Compute("neg", (0,), F32),
        Store(Access(1, strides), 1),
    )
    kernel = Kernel((S0, S1), S2, _args([F32], [F32]), body)
    emitted = emit(kernel, "k", host())
    assert sympy.expand(emitted.extent - S0 * S1 * S2) == 0
    assert emitted.cost == 1
    x = torch.randn(3 * 5 * 7, generator=torch.Generator().manual_seed(8))
    Native({"k": kernel}).check(
        "k", [x, torch.zeros(3 * 5 * 7 + 9)], {"s0": 3, "s1": 5, "s2": 7}, parts=4
    )


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
    native = Native({"k": kernel})
    for s0, s1 in ((2, 1), (2, 9), (1, 32), (3, 13)):
        n = s0 * s1 * s1
        x = torch.randn(n, generator=torch.Generator().manual_seed(9)).bfloat16()
        outs = [
            torch.zeros(n, dtype=BF16),
            torch.zeros(n, dtype=BOOL),
            torch.zeros(s0 * s1, dtype=I64),
        ]
        native.check("k", [x, *outs], {"s0": s0, "s1": s1}, parts=2)


REDUCIBLE = [
    (k, d)
    for k in ("sum", "prod", "max", "min")
    for d in (F32, BF16, F64, I64, torch.int32, torch.uint8)
]
REDUCIBLE += [(k, BOOL) for k in ("any", "all", "max", "min")]


def test_every_reduction_and_its_identity() -> None:
    def kernel(kind: str, dtype: torch.dtype) -> Kernel:
        body: tuple[Stmt, ...] = (
            Load(Access(0, (S1, 1)), dtype),
            Reduce(kind, 0, dtype),
            Store(Access(1, (1, 0)), 1),
        )
        return Kernel((S0,), S1, _args([dtype], [dtype]), body)

    native = Native({f"k{i}": kernel(*case) for i, case in enumerate(REDUCIBLE)})
    rng = torch.Generator().manual_seed(10)
    for (i, (kind, dtype)), width in itertools.product(enumerate(REDUCIBLE), (0, 1, 7, 8, 41)):
        x = samples(dtype, 3 * width, rng)
        if kind == "prod" and dtype.is_floating_point:
            x = x / 4
        native.check(f"k{i}", [x, torch.zeros(3, dtype=dtype)], {"s0": 3, "s1": width})


def test_max_and_min_propagate_nan_from_any_place() -> None:
    kernels = {
        kind: Kernel(
            (S0,),
            S1,
            _args([F32], [F32]),
            (Load(Access(0, (S1, 1)), F32), Reduce(kind, 0, F32), Store(Access(1, (1, 0)), 1)),
        )
        for kind in ("max", "min")
    }
    native = Native(kernels)
    x = torch.randn(45, 45, generator=torch.Generator().manual_seed(11))
    x.fill_diagonal_(float("nan"))
    for kind in kernels:
        out = torch.zeros(45)
        native.run(kind, [x.flatten(), out], {"s0": 45, "s1": 45})
        assert bool(out.isnan().all())


UNARY, BINARY = ("neg", "abs", "exp", "tanh", "sigmoid"), ("add", "sub", "mul", "maximum")


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    """A random body over (s0, s1, inner): loads of several layouts, pointwise ops, reductions, stores."""
    inner: Dim = draw(st.sampled_from([S2, 1, 8, 12, 32]))
    layouts = [
        (S1 * inner, inner, 1),
        (0, inner, 1),
        (0, 0, 1),
        (S1, 1, 0),
        (inner, S0 * inner, 1),
        (1, S0, S0 * S1),
    ]
    body: list[Stmt] = [Const(0.75, F32), Size(S0, F32)]
    loads = draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=3))
    body += [Load(Access(k, strides), F32) for k, strides in enumerate(loads)]
    for _ in range(draw(st.integers(1, 9))):
        value = st.integers(0, len(body) - 1)
        kind = draw(st.sampled_from(["unary", "binary", "binary", "reduce"]))
        if kind == "unary":
            bounded = Compute("tanh", (draw(value),), F32)
            body.append(bounded)
            body.append(Compute(draw(st.sampled_from(UNARY)), (len(body) - 1,), F32))
        elif kind == "binary":
            body.append(Compute(draw(st.sampled_from(BINARY)), (draw(value), draw(value)), F32))
        else:
            body.append(Reduce(draw(st.sampled_from(["sum", "max", "min"])), draw(value), F32))
    values = len(body)
    args = [*loads]
    for v in {values - 1, draw(st.integers(0, values - 1))}:
        body.append(Store(Access(len(args), (S1 * inner, inner, 1)), v))
        args.append((S1 * inner, inner, 1))
    return Kernel(
        (S0, S1), inner, _args([F32] * len(loads), [F32] * (len(args) - len(loads))), tuple(body)
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(kernels(), st.integers(0, 2**31))
def test_random_kernels(kernel: Kernel, seed: int) -> None:
    native = Native({"k": kernel})
    rng = torch.Generator().manual_seed(seed)
    for s0, s1, s2 in ((1, 1, 1), (2, 3, 5), (3, 2, 8), (2, 2, 41)):
        biggest = s0 * s1 * max(s2, 32)
        buffers = _random(rng, *[biggest for _ in kernel.args])
        for got, want in native.both("k", buffers, {"s0": s0, "s1": s1, "s2": s2}, parts=2):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)

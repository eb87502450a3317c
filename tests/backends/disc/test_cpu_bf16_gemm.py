# SPDX-License-Identifier: Apache-2.0
"""Generated products of bfloat16, through whole programs, on every kind of instruction.

Products of two bfloat16 are exact in float32, so that only sums and the result are rounded: k + 1 additions, each by at
most 2**-24 of the sum of magnitudes (twice that for ``vdpbf16ps``, which rounds a pair and then the sum), and a
bfloat16 result by at most 2**-8 of itself. ``vdpbf16ps`` flushes denormals: at most 2**-126 per addition.
"""

import hypothesis.strategies as st
import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder
from hypothesis import given, settings

from blade.backends.disc.cpu.compile.llvm import load
from blade.backends.disc.cpu.emit.bf16_dot import bf16_dot
from blade.backends.disc.cpu.gemm.bf16_gemm import gemm_text
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec
from blade.backends.disc.cpu.gemm.driver import tiling
from blade.backends.disc.cpu.gemm.gemm import GROUP_ROWS, MANY_ROWS
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

F32, BF16 = torch.float32, torch.bfloat16
WIDENING = {
    "widenx4": CpuTarget((), 4),
    "widenx8": CpuTarget(("avx2", "fma"), 8),
    "widenx16": CpuTarget(("avx512f", "avx512bw", "avx512vl", "avx512dq"), 16),
}
# LLVM ends the process at an instruction that this CPU lacks.
TARGETS = {name: one for name, one in WIDENING.items() if set(one.isa) <= set(host().isa)}
if host().has_bf16_products:
    TARGETS["dpbf16x16"] = host()
ENDS = (min(TARGETS), "widenx4") if len(TARGETS) > 3 else ("widenx4",)
DEPTH = sympy.Symbol("s3", integer=True, nonnegative=True)
ROWS = (0, 1, 2, 3, 5, 6, 7, 11, 13, GROUP_ROWS - 1, GROUP_ROWS + 1, 97)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(engine: Engine, *inputs: torch.Tensor) -> torch.Tensor:
    [found] = engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())
    return found


def check(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``got`` is a @ b + bias within what rounding may change (see the module's docstring)."""
    bias = torch.zeros(b.shape[-1]) if bias is None else bias
    exact = a.double() @ b.double() + bias.double()
    magnitude = a.double().abs() @ b.double().abs() + bias.double().abs()
    additions = a.shape[-1] + 1
    allowed = additions * (2.0**-23 * magnitude + 2.0**-126)
    if got.dtype == BF16:
        allowed = allowed + 2.0**-8 * (exact.abs() + allowed)
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= allowed).all())


def linear_engine(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    result: torch.dtype = BF16,
    target: CpuTarget | None = None,
) -> Engine:
    """x [s0, s1, k] of bfloat16 times a constant weight."""
    b = new_builder()
    x = add_input(b, (S0, S1, weight.shape[1]), BF16)
    constants = [weight] if bias is None else [weight, bias]
    operands = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    y = b.make("linear", [x, *operands], (S0, S1, len(weight)), result)
    return compile_to_engine(finish(b, y, constants=constants), target)


def check_linear(engine: Engine, weight: torch.Tensor, bias: torch.Tensor | None, m: int) -> None:
    x = numbers(1, m, weight.shape[1], seed=m)
    check(run(engine, x), x, weight.to(BF16).t(), bias)


@given(
    columns=st.sampled_from([1, 7, 16, 17, 48, 63, 64, 65, 100, 130]),
    depth=st.sampled_from([1, 2, 3, 4, 63, 64, 385, 900]),
    source=st.sampled_from([F32, BF16]),
    result=st.sampled_from([F32, BF16]),
    biased=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=5, deadline=None)
def test_any_size(
    columns: int,
    depth: int,
    source: torch.dtype,
    result: torch.dtype,
    biased: bool,
    transposed: bool,
) -> None:
    """Weights of float32 are rounded when they are packed."""
    weight = numbers(columns, depth, seed=columns * 1000 + depth, dtype=source)
    weight = weight.t().contiguous().t() if transposed else weight
    bias = numbers(columns, seed=depth, dtype=source) if biased else None
    engine = linear_engine(weight, bias, result)
    for rows in ROWS:
        check_linear(engine, weight, bias, rows)


@pytest.mark.parametrize("name", TARGETS)
def test_every_instruction_and_tile(name: str) -> None:
    target = TARGETS[name]
    dot = bf16_dot(target)
    assert name == f"{dot.how}x{dot.lanes}"
    for rest in (0, 1, dot.vectors):
        columns, depth = 2 * dot.width + max(0, rest * dot.lanes - 1), (35, 64, 1)[rest % 3]
        weight = numbers(columns, depth, seed=rest)
        engine = linear_engine(weight, target=target)
        for rows in range(1, 2 * dot.rows + 2):
            check_linear(engine, weight, None, rows)


@pytest.mark.parametrize("name", ENDS)
def test_work_by_rows(name: str) -> None:
    weight, bias = numbers(150, 77), numbers(150, seed=1)
    engine = linear_engine(weight, bias, F32, TARGETS[name])
    for rows in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 77):
        check_linear(engine, weight, bias, rows)


def test_rows_apart() -> None:
    """A slice of a wider value is read in place."""
    weight = numbers(33, 31)
    b = new_builder()
    wide = b.pointwise("neg", add_input(b, (S0, 101), BF16))
    x = b.slice(wide, 1, 3, 1, 31)
    w = b.make("const", (), weight.shape, BF16, tuple(weight.stride()), index=0)
    y = b.make("linear", [x, w], (S0, 33), BF16)
    engine = compile_to_engine(finish(b, y, wide, constants=[weight]))
    for rows in (1, 9, 300):
        given = numbers(rows, 101)
        [got, _] = engine.try_execute([given]) or pytest.fail(engine.last_error())
        check(got, -given[:, 3:34], weight.t(), None)


def test_infinities_and_nan_stay_in_their_rows() -> None:
    weight = numbers(40, 33)
    x = numbers(1, 8, 33)
    x[0, 2, 32], x[0, 5, 0] = float("inf"), float("nan")
    for target in (host(), WIDENING["widenx4"]):
        got = run(linear_engine(weight, None, F32, target), x)[0]
        assert bool(got[2].isinf().all())
        assert bool(got[5].isnan().all())
        assert bool(got[[0, 1, 3, 4, 6, 7]].isfinite().all())


def matmul_engine(
    result: torch.dtype, layout: str, columns: object = S2, target: CpuTarget | None = None
) -> Engine:
    """[s0, s1, k] times [s0, k, n]; ``layout`` of the second: rows, columns or strided."""
    b = new_builder()
    x = add_input(b, (S0, S1, DEPTH), BF16)
    if layout == "columns":
        y = b.permute(add_input(b, (S0, columns, DEPTH), BF16), (0, 2, 1))
    elif layout == "strided":
        y = b.permute(add_input(b, (DEPTH, columns, S0), BF16), (2, 0, 1))
    else:
        y = add_input(b, (S0, DEPTH, columns), BF16)
    return compile_to_engine(finish(b, b.make("matmul", [x, y], (S0, S1, columns), result)), target)


SIZES = (
    *((2, 5, 7, 3), (1, 2, 1, 1), (3, 50, 65, 33), (2, 300, 130, 64), (2, 17, 64, 100)),
    *((2, 6, 6, 0), (0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (1, 7, 40, 31), (1, 193, 40, 65)),
)


@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("name", ENDS)
def test_computed_matrices(name: str, layout: str) -> None:
    engine = matmul_engine(F32 if layout == "strided" else BF16, layout, target=TARGETS[name])
    for batch, m, n, k in SIZES:
        x, y = numbers(batch, m, k, seed=m), numbers(batch, k, n, seed=n)
        order = {"rows": (0, 1, 2), "columns": (0, 2, 1), "strided": (1, 2, 0)}[layout]
        check(run(engine, x, y.permute(order).contiguous()), x, y, None)


def test_known_columns_have_tiles_of_their_own() -> None:
    engine = matmul_engine(BF16, "rows", 40)
    for m, k in ((1, 1), (7, 31), (200, 64)):
        x, y = numbers(2, m, k, seed=m), numbers(2, k, 40, seed=k)
        check(run(engine, x, y), x, y, None)


def test_a_linear_with_computed_weights() -> None:
    """As in training: the product packs its second matrix on the fly, and adds the bias before it rounds."""
    b = new_builder()
    x, w = add_input(b, (S0, S1, 37), BF16), add_input(b, (50, 37), BF16)
    bias = add_input(b, (50,), BF16)
    engine = compile_to_engine(finish(b, b.make("linear", [x, w, bias], (S0, S1, 50), BF16)))
    w, bias = numbers(50, 37), numbers(50, seed=2)
    for rows in (0, 2, 70):
        x = numbers(2, rows, 37, seed=rows)
        check(run(engine, x, w, bias), x, w.t(), bias)


@pytest.mark.parametrize("has_products", [True, False])
def test_the_instruction_is_used_where_the_target_has_it(has_products: bool) -> None:
    isa = ("avx512f", "avx512bw", "avx512vl", "avx512dq") + ("avx512_bf16",) * has_products
    dot = bf16_dot(CpuTarget(isa, 16))
    text = gemm_text(Bf16KernelSpec(dot, tiling(64, dot.rows, dot.vectors, dot.lanes), "f32"))
    assert ("dpbf16ps" in text) == has_products
    if host().has_bf16_products or not has_products:
        load([(f"bf16_gemm_{dot.how}{dot.lanes}_f32", text)])

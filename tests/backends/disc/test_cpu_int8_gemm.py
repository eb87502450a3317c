# SPDX-License-Identifier: Apache-2.0
"""The generated int8 GEMM, through whole programs: the integers exactly, on every kind of instruction."""

import hypothesis.strategies as st
import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder
from hypothesis import given, settings

from blade.backends.disc.cpu.emit.int8_dot import int8_dot
from blade.backends.disc.cpu.gemm.driver import tiling
from blade.backends.disc.cpu.gemm.gemm import GROUP_ROWS, MANY_ROWS
from blade.backends.disc.cpu.gemm.int8_gemm import gemm_text
from blade.backends.disc.cpu.gemm.int8_micro_kernel import ROW_FACTORS, Int8KernelSpec
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

EVERY_TARGET = {
    "plain4": CpuTarget((), 4),
    "madd4": CpuTarget(("sse4_1",), 4),
    "madd8": CpuTarget(("avx2", "fma"), 8),
    "madd16": CpuTarget(("avx512f", "avx512bw"), 16),
}
# LLVM ends the process at an instruction that this CPU lacks.
TARGETS = {
    name: target for name, target in EVERY_TARGET.items() if set(target.isa) <= set(host().isa)
}
WITH_VNNI = {
    "vnni8": CpuTarget(("avx2", "fma", "avx512_vnni", "avx512vl"), 8),
    "vnni16": CpuTarget(("avx512f", "avx512bw", "avx512_vnni"), 16),
}


def _targets() -> dict[str, CpuTarget]:
    return TARGETS | {n: one for n, one in WITH_VNNI.items() if set(one.isa) <= set(host().isa)}


ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 13, GROUP_ROWS - 1, GROUP_ROWS + 1, 97)


def int8_engine(
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    target: CpuTarget | None = None,
    rows: str = "none",
    scale: float = 1.0,
    zero: int = 0,
) -> Engine:
    """x [s0, s1, k], then a scale and a zero point for each row where ``rows`` says so."""
    b = new_builder()
    operands = [add_input(b, (S0, S1, weight.shape[1]), torch.uint8)]
    per_row = [torch.float32] * ("scale" in rows) + [torch.int32] * ("zero" in rows)
    of_rows = [add_input(b, (S0, S1, 1), dtype) for dtype in per_row]
    constants = [weight, scales, bias]
    operands += [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    shape = (S0, S1, weight.shape[0])
    y: Value = b.make(
        "int8_linear", [*operands, *of_rows], shape, torch.float32, scale=scale, zero=zero
    )
    return compile_to_engine(finish(b, y, constants=constants), target)


def bytes_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes, a third of them the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, shape, generator=generator)
    ends = torch.tensor([info.min, info.max])[torch.randint(0, 2, shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.3, ends, x).to(dtype)


def run(engine: Engine, *inputs: torch.Tensor) -> torch.Tensor:
    [found] = engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())
    return found


def check_integers(engine: Engine, weight: torch.Tensor, rows: int, zero: int = 0) -> None:
    """With scales of 1 every element is the exact sum, rounded to float32 once."""
    x = bytes_of(1, rows, weight.shape[1], dtype=torch.uint8, seed=rows)
    exact = (x.long() - zero) @ weight.long().t()
    assert torch.equal(run(engine, x), exact.float())


def plain_engine(weight: torch.Tensor, target: CpuTarget | None = None, zero: int = 0) -> Engine:
    columns = len(weight)
    return int8_engine(weight, torch.ones(columns), torch.zeros(columns), target, zero=zero)


@given(
    columns=st.sampled_from([1, 7, 16, 17, 48, 63, 64, 65, 100, 130]),
    depth=st.sampled_from([1, 2, 3, 4, 5, 63, 64, 66, 385, 900]),
    zero=st.sampled_from([0, 1, 128, 255]),
    transposed=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_any_size(columns: int, depth: int, zero: int, transposed: bool) -> None:
    weight = bytes_of(columns, depth, dtype=torch.int8, seed=columns * 1000 + depth)
    weight = weight.t().contiguous().t() if transposed else weight
    engine = plain_engine(weight, zero=zero)
    for rows in ROWS:
        check_integers(engine, weight, rows, zero)


@pytest.mark.parametrize("name", sorted(TARGETS.keys() | WITH_VNNI.keys()))
def test_every_instruction_and_tile(name: str) -> None:
    if name not in _targets():
        pytest.skip("this CPU has no VNNI")
    target = _targets()[name]
    tiles = int8_dot(target)
    assert f"{tiles.how}{tiles.lanes}" == name
    for rest in range(tiles.vectors + 1):
        columns, depth = 2 * tiles.width + max(0, rest * tiles.lanes - 1), (35, 64, 1)[rest % 3]
        weight = bytes_of(columns, depth, dtype=torch.int8, seed=rest)
        engine = plain_engine(weight, target, zero=128)
        for rows in range(1, 2 * tiles.rows + 2):
            check_integers(engine, weight, rows, 128)


@pytest.mark.parametrize("name", _targets())
def test_the_ends_of_the_range_do_not_saturate(name: str) -> None:
    """255 * -128 everywhere, to the greatest depth that a product may have."""
    depth = 65_000
    weight = torch.full((17, depth), -128, dtype=torch.int8)
    weight[1], weight[2, ::2] = 127, 127
    x = torch.full((1, 3, depth), 255, dtype=torch.uint8)
    found = run(plain_engine(weight, _targets()[name]), x)
    assert torch.equal(found, (x.long() @ weight.long().t()).float())


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rows", ["none", "scale", "scale and zero"])
def test_scales_zero_points_and_bias(lanes: int, rows: str) -> None:
    torch.manual_seed(lanes)
    weight = bytes_of(83, 130, dtype=torch.int8)
    scales, bias = torch.rand(83) + 0.01, torch.randn(83)
    factor, zero = (0.37, 77) if rows == "none" else (1.0, 0 if "zero" in rows else 128)
    engine = int8_engine(
        weight, scales, bias, CpuTarget(host().isa, lanes), rows, scale=factor, zero=zero
    )
    for count in ROWS:
        x = bytes_of(1, count, 130, dtype=torch.uint8, seed=count)
        row_scale, row_zero = torch.rand(1, count, 1), torch.randint(0, 256, (1, count, 1))
        given = [row_scale] * ("scale" in rows) + [row_zero.int()] * ("zero" in rows)
        exact = (x.long() - (row_zero if "zero" in rows else zero)) @ weight.long().t()
        factors = (scales * factor).double() * (row_scale if "scale" in rows else 1.0)
        want = exact * factors + bias
        # three roundings of the product (its own, of the factors, of the sum's integer), one of the sum
        allowed = 2.0**-24 * (4 * (exact * factors).abs() + want.abs()) * 1.001
        found = run(engine, x, *given)
        assert found.dtype == torch.float32 and found.shape == want.shape
        assert bool(((found - want).abs() <= allowed).all())


def test_a_run_of_units_is_any_run() -> None:
    """However units are split between threads, every element is computed."""
    weight = bytes_of(200, 40, dtype=torch.int8)
    engine = plain_engine(weight)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            for rows in (GROUP_ROWS * 3 + 5, MANY_ROWS - 9, MANY_ROWS + 75):
                check_integers(engine, weight, rows)
    finally:
        torch.set_num_threads(threads)


def test_weights_of_several_constants() -> None:
    """Projections merged side by side: nothing is concatenated at run time."""
    torch.manual_seed(0)
    b = new_builder()
    x = add_input(b, (S0, 20), torch.uint8)
    weights = [bytes_of(n, 20, dtype=torch.int8, seed=n) for n in (8, 32, 24)]
    constants = [*weights, *(torch.rand(len(w)) for w in weights)]
    found = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    columns = sum(map(len, weights))
    whole = b.make("concat", found[:3], (columns, 20), torch.int8, axis=0)
    scales = b.make("concat", found[3:], (columns,), torch.float32, axis=0)
    zeros = b.fill(0, (columns,), torch.float32)
    y = b.make(
        "int8_linear", (x, whole, scales, zeros), (S0, columns), torch.float32, scale=1.0, zero=3
    )
    engine = compile_to_engine(finish(b, y, constants=constants))
    assert "copy" not in engine.program() and "call" not in engine.program()
    rows = bytes_of(9, 20, dtype=torch.uint8)
    exact = (rows.long() - 3) @ torch.cat(weights).long().t()
    torch.testing.assert_close(run(engine, rows), exact * torch.cat(constants[3:]))


@pytest.mark.parametrize("rows", ROW_FACTORS)
def test_arms_instruction_is_valid_code(rows: str) -> None:
    """It cannot run here: signed bytes, the difference made up for in zero points."""
    from torch_mlir import ir
    from torch_mlir._mlir_libs import _mlirRegisterEverything  # noqa: F401

    tiles = int8_dot(CpuTarget(("asimd", "asimddp"), 4))
    assert (tiles.how, tiles.offset) == ("sdot", 128)
    text = gemm_text(Int8KernelSpec(tiles, tiling(40, tiles.rows, tiles.vectors, 4), rows))
    assert "llvm.aarch64.neon.sdot" in text
    with ir.Context():
        assert ir.Module.parse(f"module {{\n{text}\n}}\n").operation.verify()

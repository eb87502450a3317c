# SPDX-License-Identifier: Apache-2.0
"""Generated products of floats with weights of 8 and 4 bits, through whole programs."""

import itertools

import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.cpu.gemm.micro_kernel import gemm_tiling
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 49, 97)


def make(
    columns: int, depth: int, groups: int, bits: int, zeros: bool = False
) -> list[torch.Tensor]:
    """Weights, scales (and zero points beside them) and a bias."""
    generator = torch.Generator().manual_seed(columns * 1000 + depth)
    limit = 1 << (bits - 1)
    weight = torch.randint(-limit, limit, (columns, depth), generator=generator).to(torch.int8)
    scales = torch.rand(columns, groups, generator=generator) + 0.1
    if zeros:
        points = torch.randint(-limit, limit, (columns, groups), generator=generator)
        scales = torch.cat((scales, points.float()), 1)
    return [weight, scales, torch.randn(columns, generator=generator)]


def engine_of(
    constants: list[torch.Tensor], bits: int, target: CpuTarget | None = None, zeros: bool = False
) -> Engine:
    """x [s0, s1, k] times them."""
    b = new_builder()
    columns, depth = constants[0].shape
    x = add_input(b, (S0, S1, depth))
    held = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    shape = (S0, S1, columns)
    y = b.make("weight_only_linear", (x, *held), shape, torch.float32, bits=bits, zeros=zeros)
    return compile_to_engine(finish(b, y, constants=constants), target)


def check(engine: Engine, constants: list[torch.Tensor], rows: int, zeros: bool = False) -> None:
    """Within Higham's bound for sums of k products (see test_cpu_gemm), a group's scale rounding once more."""
    weight, scales, bias = constants
    depth = weight.shape[1]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, depth, generator=generator)
    scales, points = scales.chunk(2, 1) if zeros else (scales, torch.zeros_like(scales))
    size = depth // scales.shape[1]
    wide = weight.double() - points.double().repeat_interleave(size, 1)
    wide = wide * scales.double().repeat_interleave(size, 1)
    exact = x.double() @ wide.t() + bias
    magnitude = x.double().abs() @ wide.abs().t() + bias.abs()
    error = (depth + scales.shape[1] + 2) * torch.finfo(torch.float32).eps / 2
    [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert bool(((found - exact).abs() <= error / (1 - error) * magnitude).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("depth", "groups"), [(2, 1), (66, 1), (66, 3), (256, 8), (900, 1)])
def test_any_size(bits: int, depth: int, groups: int) -> None:
    for columns in (1, 64, 100):
        constants = make(columns, depth, groups, bits)
        engine = engine_of(constants, bits)
        assert f"kernel widen{bits}_gemm" in engine.program()
        for rows in ROWS:
            check(engine, constants, rows)


@pytest.mark.parametrize(("lanes", "bits"), list(itertools.product((4, 8, 16), (8, 4))))
def test_every_tile(lanes: int, bits: int) -> None:
    target = CpuTarget(host().isa, lanes)
    tiles = gemm_tiling(target)
    for rest in range(tiles.vectors + 1):
        columns = tiles.width + max(0, rest * lanes - 1)
        depth, zeros = (48, True) if rest % 2 else (36, False)  # words of 4 bits, or bytes
        constants = make(columns, depth, 2, bits, zeros)
        engine = engine_of(constants, bits, target, zeros)
        for rows in range(1, 14):
            check(engine, constants, rows, zeros)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_infinity_stays_one(bits: int) -> None:
    """As with the dequantized weight: zero points are subtracted before the product."""
    weight = torch.full((20, 64), 3, dtype=torch.int8)
    scales = torch.cat((torch.ones(20, 2), torch.full((20, 2), 1.0)), 1)
    engine = engine_of([weight, scales, torch.zeros(20)], bits, zeros=True)
    x = torch.ones(1, 1, 64)
    x[..., 5] = torch.inf
    [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
    assert bool((found == torch.inf).all())


def test_odd_depth_of_bytes() -> None:
    constants = make(33, 35, 5, 8)
    engine = engine_of(constants, 8)
    for rows in ROWS:
        check(engine, constants, rows)

# SPDX-License-Identifier: Apache-2.0
"""Which blocks are tried for products of 8 bits: they fit, they share the depth evenly, there is always one."""

import pytest
import torch
from cpu_native import symbol

from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import EIGHT_BIT_CLASSES, classes_of
from blade.backends.disc.gpu.gemm.product import GemmProduct, product_of
from blade.backends.disc.gpu.gemm.tile_table import unmeasured
from blade.backends.disc.gpu.gemm.tile_table_8bit import MANY, candidates
from blade.backends.disc.ir.graph import Dim, IrBuilder
from blade.backends.disc.target.gpu import GpuTarget

S = symbol("s0")
TARGETS = (GpuTarget(), GpuTarget(89, 58, 99 * 1024))
SIZES = ((4096, 4096), (768, 3072), (3072, 768), (11008, 4096), (16, 16), (48, 10000), (4096, 160))


def product(rows: Dim, columns: int, depth: int) -> GemmProduct:
    b, f8, f32 = IrBuilder(), torch.float8_e4m3fn, torch.float32
    x = b.make("input", (), (rows, depth), f8, index=0)
    s = b.make("input", (), (rows, 1), f32, index=1)
    w = b.make("const", (), (columns, depth), f8, index=0)
    ws = b.make("const", (), (columns,), f32, index=1)
    none = b.fill(0, (columns,), f32)
    y = b.make("scaled_linear", (x, w, ws, none, s), (rows, columns), f32, scale=1.0)
    found = product_of(y, plain_epilogue(y))
    assert found is not None
    return found


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_candidates_fit(target: GpuTarget, columns: int, depth: int) -> None:
    made = product(S, columns, depth)
    assert classes_of(made) == EIGHT_BIT_CLASSES
    for most in EIGHT_BIT_CLASSES:
        found = candidates(made, most, target)
        assert found and len(set(found)) == len(found)
        for tile in found:
            assert (tile.m + tile.n) * tile.k * (tile.stages - 1) <= target.shared
            assert tile.k >= 32 and tile.n >= 16  # what tensor cores take of bytes
            assert tile.split == 1 or depth % (tile.split * tile.k) == 0
            blocks = -(-(most or MANY) // tile.m) * -(-columns // tile.n)
            assert tile.split == 1 or blocks * tile.split <= target.multiprocessors


def test_without_a_measurement_it_is_ours_for_any_number_of_rows() -> None:
    for rows in (S, 1, 7, 5000):
        plan = unmeasured(product(rows, 768, 768), GpuTarget())
        assert all(tile is not None for _, tile in plan.ranges)
    assert len(plan.ranges) == 1


def test_products_that_differ_in_their_scales_have_plans_of_their_own() -> None:
    one = product(S, 64, 64)
    assert one.scales is not None and one.scales.names == ["w_scale", "x_scale"]
    b = IrBuilder()
    x, w = (b.make("input", (), (n, 64), torch.int8, index=k) for k, n in enumerate((S, 64)))
    ws = b.make("const", (), (64,), torch.float32, index=1)
    keys = set()
    for scale in (0.5, 0.25):
        operands = (x, w, ws, b.fill(0, (64,), torch.float32))
        y = b.make("scaled_linear", operands, (S, 64), torch.float32, scale=scale)
        found = product_of(y, plain_epilogue(y))
        assert found is not None
        keys.add(found.key)
    assert len(keys | {one.key}) == 3

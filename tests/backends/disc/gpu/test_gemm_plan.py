# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes a product at which number of rows."""

import pytest
import sympy
import torch
from cpu_native import symbol

from blade.backends.disc.gpu.gemm.benchmark import sizes_for
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import (
    CLASSES,
    GemmPlan,
    between,
    classes,
    merged,
)
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile, product_of
from blade.backends.disc.gpu.gemm.tile_table import candidate, unmeasured
from blade.backends.disc.ir.graph import IrBuilder, Shape
from blade.backends.disc.target.gpu import GpuTarget

B, S = symbol("s0"), symbol("s1")
TARGET = GpuTarget()


def product(
    rows: Shape, columns: int, depth: int, dtype: torch.dtype = torch.float16
) -> GemmProduct:
    b = IrBuilder()
    x = b.make("input", (), (*rows, depth), dtype, index=0)
    w = b.make("const", (), (columns, depth), dtype, index=0)
    y = b.make("linear", (x, w), (*rows, columns), dtype)
    found = product_of(y, plain_epilogue(y))
    assert found is not None
    return found


@pytest.mark.parametrize("sizes", [(0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_a_product_of_nothing_has_no_kernel(sizes: tuple[int, int, int]) -> None:
    """There is nothing to measure either."""
    with pytest.raises(AssertionError):
        product((sizes[0],), *sizes[1:])


def test_neighbours_that_agree_are_one_range() -> None:
    small, large = GemmTile(16, 32, 64), GemmTile(64, 64, 64)
    plan = merged([(32, small), (128, small), (256, large), (None, None)])
    assert plan.ranges == ((128, small), (256, large), (None, None))
    assert merged([(32, small)]).ranges == ((None, small),)
    with pytest.raises(AssertionError):
        GemmPlan(((32, small),))


def test_a_plan_by_one_is_atens_for_all_rows_or_for_none() -> None:
    small, large = GemmTile(16, 32, 64), GemmTile(64, 64, 64)
    mixed = merged([(32, None), (128, small), (256, None), (None, large)])
    assert mixed.by_one.ranges == ((128, small), (None, large))
    assert merged([(32, small), (None, None)]).by_one.ranges == ((None, None),)
    assert merged([(32, small), (None, large)]).by_one.ranges == ((32, small), (None, large))


def test_ranges_hold_once_for_every_number_of_rows() -> None:
    plan = unmeasured(product((B, S), 768, 3072), TARGET)
    assert len(plan.ranges) == 3  # up to 32 rows, up to 128, ATen's
    for rows in (0, 1, 32, 33, 128, 129, 10**6):
        low, holds = 0, []
        for most, tile in plan.ranges:
            if between(sympy.Integer(rows), low, most) == sympy.true:
                holds.append(tile)
            low = 0 if most is None else most + 1
        assert len(holds) == 1 and (holds[0] is None) == (rows > 128)


def test_a_known_number_of_rows_has_one_class() -> None:
    assert classes(S) == CLASSES
    assert [classes(n) for n in (1, 32, 33, 512, 513)] == [(32,), (32,), (128,), (512,), (None,)]
    assert unmeasured(product((7,), 768, 768), TARGET).ranges[0][1] is not None
    assert unmeasured(product((700,), 768, 768), TARGET).ranges == ((None, None),)


def test_rows_that_begin_anywhere_have_a_tile_for_any_number() -> None:
    """ATen's kernels for them take three times as long, and calls write where graphs have to copy from."""
    for most in (256, 512, None):
        assert candidate(product((S,), 50257, 768), most, TARGET) is not None
        assert candidate(product((S,), 50256, 768), most, TARGET) is None
        assert candidate(product((S,), 50257, 768, torch.float32), most, TARGET) is None
        assert candidate(product((S,), 30, 768), most, TARGET) is None


def test_depth_is_shared_evenly_and_no_further_than_there_are_multiprocessors() -> None:
    for columns, depth in ((768, 3072), (768, 768), (64, 4096), (50000, 4096), (768, 3000)):
        for most in (32, 128):
            tile = candidate(product((S,), columns, depth), most, TARGET)
            assert tile is not None
            blocks = -(-most // tile.m) * -(-columns // tile.n)
            assert tile.split == 1 or depth % (tile.split * tile.k) == 0
            assert tile.split == 1 or blocks * tile.split <= TARGET.multiprocessors
    shared = candidate(product((S,), 768, 3072), 32, TARGET)
    assert shared is not None and shared.split == 4


def test_sizes_for_a_number_of_rows() -> None:
    assert sizes_for(product((B, S), 8, 16), 32) == {B: 32, S: 1}
    assert sizes_for(product((5,), 8, 16), 5) == {}
    assert sizes_for(product((5,), 8, 16), 6) is None
    assert sizes_for(product((2 * S + 1,), 8, 16), 32) is None

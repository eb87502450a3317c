# SPDX-License-Identifier: Apache-2.0
"""The generated product of two computed matrices, in every layout of the second one."""

from collections.abc import Sequence

import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.cpu.target import Target, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

S3 = sympy.Symbol("s3", integer=True, nonnegative=True)
SIZES = [  # batch, m, k, n
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (3, 13, 16, 64),
    (1, 40, 33, 65),
    (2, 200, 20, 31),
    (1, 193, 400, 129),
    (5, 6, 48, 100),
]
EMPTY = [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)]


def product_engine(layout: Sequence[int], lanes: int) -> Engine:
    """a [s0, s1, s2] @ b, which is stored with its axes (batch, k, n) in the order ``layout``."""
    builder = new_builder()
    a = add_input(builder, (S0, S1, S2))
    sizes = (S0, S2, S3)
    stored = add_input(builder, [sizes[k] for k in layout])
    b = builder.permute(stored, [list(layout).index(k) for k in range(3)])
    y = builder.make("matmul", (a, b), (S0, S1, S3), torch.float32)
    engine = compile_to_engine(finish(builder, y), Target(host().isa, lanes))
    assert "kernel matmul_f32" in engine.program()
    return engine


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1), (1, 2, 0)], ids=str)
def test_any_size_and_layout(layout: tuple[int, ...], lanes: int) -> None:
    engine = product_engine(layout, lanes)
    generator = torch.Generator().manual_seed(lanes)
    for batch, m, k, n in SIZES + EMPTY:
        a = torch.randn(batch, m, k, generator=generator)
        b = torch.randn(batch, k, n, generator=generator)
        [found] = engine.try_execute([a, b.permute(layout).contiguous()]) or pytest.fail(
            engine.last_error()
        )
        # k fused products in any order: within gamma(k + 1) of the sum of their magnitudes
        bound = (
            (k + 1) * 2.0**-24 / (1 - (k + 1) * 2.0**-24) * (a.double().abs() @ b.double().abs())
        )
        assert found.shape == (batch, m, n)
        assert bool(((found - a.double() @ b.double()).abs() <= bound).all()), (batch, m, k, n)


def test_rows_that_are_not_adjacent_are_left_to_aten() -> None:
    builder = new_builder()
    a = add_input(builder, (S0, S2, S1))
    b = add_input(builder, (S0, S2, S3))
    left = builder.permute(a, (0, 2, 1))
    y = builder.make("matmul", (left, b), (S0, S1, S3), torch.float32)
    engine = compile_to_engine(finish(builder, y))
    assert "aten::bmm.out" in engine.program()
    x, w = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    [found] = engine.try_execute([x, w]) or pytest.fail(engine.last_error())
    torch.testing.assert_close(found, x.transpose(1, 2) @ w)

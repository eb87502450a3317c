# SPDX-License-Identifier: Apache-2.0
"""Reductions over an axis beside the contiguous one: each lane a row, against the interpreter."""

import itertools
from typing import Any

import pytest
import torch
from cpu_native import Native, samples, symbol

from blade.backends.disc.cpu.emit.column_blocks import side_by_side
from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Const,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Store,
)
from blade.backends.disc.target.cpu import CpuTarget, host

S0, S1, S2 = (symbol(f"s{k}") for k in range(3))
WIDE = (S1 * S2, 1, S2)  # [s0, s1, s2] walked as outer (s0, s2), inner s1
F32 = torch.float32
TARGETS = [CpuTarget(host().isa, lanes) for lanes in sorted({8, host().lanes})]
SIZES = [(1, 1, 1), (2, 3, 5), (1, 7, 16), (3, 20, 33), (2, 5, 130), (0, 4, 9), (2, 0, 20)]


def softmax() -> Kernel:
    body = (
        Load(Access(0, WIDE), F32),
        Reduce("max", 0, F32),
        Compute("sub", (0, 1), F32),
        Compute("exp", (2,), F32),
        Reduce("sum", 3, F32),
        Compute("div", (3, 4), F32),
        Store(Access(1, WIDE), 5),
        Store(Access(2, (S2, 1, 0)), 4),
    )
    args = (Arg(F32, False), Arg(F32, True), Arg(F32, True))
    return Kernel((S0, S2), S1, args, body)


def totals(kind: str, dtype: torch.dtype, stored: tuple[object, ...] = (S2, 1, 0)) -> Kernel:
    body = (
        Load(Access(0, WIDE), dtype),
        Reduce(kind, 0, dtype),
        Store(Access(1, stored), 1),  # type: ignore[arg-type]
    )
    return Kernel((S0, S2), S1, (Arg(dtype, False), Arg(dtype, True)), body)


def counted() -> Kernel:
    """Every index and a constant, against a value of each column and one of each row."""
    body = (
        Load(Access(0, WIDE), F32),
        Load(Access(1, (0, 1, 0)), F32),
        Load(Access(2, (1, 0, 0)), F32),
        *(Index(k, F32) for k in range(3)),
        Const(0.5, F32),
        Compute("fma", (0, 1, 2), F32),
        Compute("fma", (3, 4, 5), F32),
        Compute("fma", (7, 6, 8), F32),
        Reduce("sum", 9, F32),
        Store(Access(3, (S2, 1, 0)), 10),
    )
    args = (*(Arg(F32, False) for _ in range(3)), Arg(F32, True))
    return Kernel((S0, S2), S1, args, body)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.lanes} lanes")
def test_columns_are_the_interpreters(target: CpuTarget) -> None:
    kinds = [
        ("sum", F32),
        ("max", torch.bfloat16),
        ("any", torch.bool),
        ("prod", torch.int64),
        ("min", torch.int8),
        ("sum", torch.float64),
    ]
    kernels = {f"{kind}_{str(d)[6:]}": totals(kind, d) for kind, d in kinds}
    kernels |= {"softmax": softmax(), "counted": counted()}
    kernels["apart"] = totals("sum", F32, (1, S0, 0))
    assert all(side_by_side(k) == 1 for k in kernels.values())
    native = Native(kernels, target)
    rng = torch.Generator().manual_seed(0)
    for (name, kernel), size in itertools.product(kernels.items(), SIZES):
        s0, s1, s2 = size
        numels = {
            "softmax": [s0 * s1 * s2, s0 * s1 * s2, s0 * s2],
            "counted": [s0 * s1 * s2, s2, s0, s0 * s2],
        }.get(name, [s0 * s1 * s2, s0 * s2])
        buffers = [samples(a.dtype, n + 1, rng) for a, n in zip(kernel.args, numels, strict=True)]
        native.check(name, buffers, {"s0": s0, "s1": s1, "s2": s2}, parts=2)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.lanes} lanes")
@pytest.mark.parametrize("columns", [S2, 5, 24, 130], ids=str)
def test_rows_of_a_table_share_an_index(target: CpuTarget, columns: Any) -> None:
    def picked(index: Access) -> Kernel:
        body = (
            Load(index, torch.int64),
            Gather(Access(1, (0, 1, 0)), 0, columns, F32),
            Reduce("sum", 1, F32),
            Store(Access(2, (columns, 1, 0)), 2),
        )
        args = (Arg(torch.int64, False), Arg(F32, False), Arg(F32, True))
        return Kernel((S0, columns), S1, args, body)

    kernel = picked(Access(0, (S1, 0, 1)))
    assert side_by_side(kernel) == 1
    assert side_by_side(picked(Access(0, (0, S1, 1)))) is None  # an index for each column
    native = Native({"k": kernel}, target)
    rng = torch.Generator().manual_seed(0)
    for s0, s1, s2 in SIZES:
        width = s2 if columns is S2 else columns
        index = torch.randint(0, 9, (s0 * s1,), generator=rng)
        table, out = samples(F32, 9 * width, rng), samples(F32, s0 * width, rng)
        native.check("k", [index, table, out], {"s0": s0, "s1": s1, "s2": s2}, parts=2)


def test_a_row_that_is_contiguous_stays_in_lanes() -> None:
    kernel = totals("sum", F32)
    rows = (S1 * S2, S1, 1)
    contiguous = Kernel(
        kernel.outer, S1, kernel.args, (Load(Access(0, rows), F32), *kernel.body[1:])
    )
    assert side_by_side(contiguous) is None
    assert side_by_side(Kernel((S0, 2), S1, kernel.args, kernel.body)) is None


def test_many_places_keep_precision() -> None:
    """Sums of 0.1 in one accumulator would be off by 1e-3; torch's own are within 1e-6."""
    native = Native({"k": totals("sum", F32)})
    x, out = torch.full((1 << 20,), 0.1), torch.zeros(4)
    native.run("k", [x, out], {"s0": 1, "s1": 1 << 18, "s2": 4})
    torch.testing.assert_close(out, torch.full((4,), 0.1 * (1 << 18)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("places", [49, 196, 3136])
def test_the_pixels_of_an_image_are_summed_to_four_roundings(places: int) -> None:
    """The mean of an image's equal pixels: one accumulator would be off by ten roundings at 196."""
    native = Native({"k": totals("sum", F32)})
    x, out = torch.full((4 * places,), 3.2), torch.zeros(4)
    native.run("k", [x, out], {"s0": 1, "s1": places, "s2": 4})
    want = torch.full((4,), 3.2).double() * places
    assert ((out.double() - want) / want).abs().max() <= 4 * torch.finfo(F32).eps


def test_extent_counts_blocks_of_rows() -> None:
    emitted = emit(totals("sum", F32), "k", CpuTarget(host().isa, 8))
    assert emitted.extent.subs({S0: 3, S2: 65}) == 9  # type: ignore[union-attr]

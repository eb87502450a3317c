# SPDX-License-Identifier: Apache-2.0
"""Kernels that transpose, in tiles and at their edges, against the interpreter."""

import itertools

import pytest
import torch
from cpu_native import Native, samples, symbol

from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.ir.iteration_space import across
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Dim,
    Index,
    Kernel,
    Load,
    Size,
    Store,
)
from blade.backends.disc.target.cpu import CpuTarget, host

S0, S1, S2 = (symbol(f"s{k}") for k in range(3))
TURNED: tuple[Dim, ...] = (S1 * S2, 1, S1)  # [s0, s2, s1] read as [s0, s1, s2]
STRAIGHT: tuple[Dim, ...] = (S1 * S2, S2, 1)
F32 = torch.float32
TARGETS = [CpuTarget(host().isa, lanes) for lanes in sorted({8, host().lanes})]
SIZES = [(1, 1, 1), (2, 16, 16), (1, 17, 33), (2, 3, 40), (1, 40, 3), (1, 48, 100), (0, 16, 16)]


def copied(dtype: torch.dtype, source: tuple[Dim, ...], target: tuple[Dim, ...]) -> Kernel:
    body = (Load(Access(0, source), dtype), Store(Access(1, target), 0))
    return Kernel((S0, S1), S2, (Arg(dtype, False), Arg(dtype, True)), body)


def mixed() -> Kernel:
    """A turned operand, a straight one, one of each row, one of each column, and every index."""
    body = (
        Load(Access(0, TURNED), F32),
        Load(Access(1, STRAIGHT), F32),
        Load(Access(2, (0, 1, 0)), F32),
        Load(Access(3, (0, 0, 1)), F32),
        *(Index(k, F32) for k in range(3)),
        Size(S1, F32),
        Compute("fma", (0, 1, 2), F32),
        Compute("fma", (3, 4, 5), F32),
        Compute("fma", (8, 6, 9), F32),
        Compute("add", (10, 7), F32),
        Store(Access(4, STRAIGHT), 11),
        Store(Access(5, TURNED), 8),
    )
    args = (*(Arg(F32, False) for _ in range(4)), Arg(F32, True), Arg(F32, True))
    return Kernel((S0, S1), S2, args, body)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.lanes} lanes")
def test_tiles_are_the_interpreters(target: CpuTarget) -> None:
    dtypes = [F32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.int64]
    kernels = {f"in_{str(d)[6:]}": copied(d, TURNED, STRAIGHT) for d in dtypes}
    kernels |= {"out": copied(F32, STRAIGHT, TURNED), "mixed": mixed()}
    kernels["apart"] = copied(F32, (S1 * S2 * 2, 1, S1 * 2), (S1 * S2, S2, 1))
    assert all(across(k) == 1 for k in kernels.values())
    native = Native(kernels, target)
    rng = torch.Generator().manual_seed(0)
    for (name, kernel), (s0, s1, s2) in itertools.product(kernels.items(), SIZES):
        total = s0 * s1 * s2
        numels = {"mixed": [total, total, s1, s2, total, total], "apart": [2 * total, total]}
        sizes = numels.get(name, [total, total])
        buffers = [samples(a.dtype, n + 1, rng) for a, n in zip(kernel.args, sizes, strict=True)]
        native.check(name, buffers, {"s0": s0, "s1": s1, "s2": s2}, parts=2)


def test_a_tile_is_turned_in_registers() -> None:
    text = emit(copied(F32, TURNED, STRAIGHT), "k", TARGETS[-1]).text
    assert text.count("vector.shuffle") == 4 * 16
    assert text.count("masked") == 0


def test_extent_counts_blocks_of_rows() -> None:
    emitted = emit(copied(F32, TURNED, STRAIGHT), "k", TARGETS[-1])
    assert emitted.extent.subs({S0: 3, S1: 33}) == 9  # type: ignore[union-attr]

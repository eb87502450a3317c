# SPDX-License-Identifier: Apache-2.0
"""The order of kernels: what reads a large value last does not keep it alive for long."""

import torch
from disc_programs import S0, S1, add_input, finish, legalized, new_builder

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, fuse
from blade.backends.disc.fusion.shorten_lives import shorten_lives
from blade.backends.disc.ir.graph import Graph, Value


def order(graph: Graph) -> list[str]:
    """The units, named by what they compute last."""

    def name(unit: FusionGroup | Value) -> str:
        return unit.members[-1].op if isinstance(unit, FusionGroup) else unit.op

    fused = fuse(legalized(graph))
    made = shorten_lives(fused)
    assert sorted(map(id, made.units)) == sorted(map(id, fused.units))
    _check_comes_after_what_it_reads(made)
    return [name(unit) for unit in made.units]


def _check_comes_after_what_it_reads(fused: Fused) -> None:
    units = {
        m.id: k
        for k, unit in enumerate(fused.units)
        for m in (unit.members if isinstance(unit, FusionGroup) else [unit])
    }
    for k, unit in enumerate(fused.units):
        stack = [
            a for m in (unit.members if isinstance(unit, FusionGroup) else [unit]) for a in m.args
        ]
        while stack:
            value = stack.pop()
            if value.id in units:
                assert units[value.id] <= k
            else:
                stack += value.args


def products(sizes: tuple[object, int], last: str) -> Graph:
    """x times three matrices; ``last``: what is computed at the end of the first product."""
    b = new_builder()
    x = add_input(b, sizes)
    weights = [add_input(b, (sizes[1], sizes[1])) for _ in range(3)]
    first = y = b.make("matmul", (x, weights[0]), x.shape, x.dtype)
    for w in weights[1:]:
        y = b.make("matmul", (y, w), x.shape, x.dtype)
    if last == "sum":
        return finish(b, y, b.reduce("sum", first, [0]))
    return finish(b, y, b.pointwise(last, first))


def test_a_gradients_sum_follows_what_it_sums() -> None:
    assert order(products((S0, 512), "sum"))[:2] == ["matmul", "reduce"]


def test_a_copy_for_the_caller_follows_what_it_copies() -> None:
    assert order(products((S0, 512), "exp"))[:2] == ["matmul", "exp"]


def test_small_values_stay_where_they_are() -> None:
    assert order(products((2, 8), "exp"))[-1] == "exp"


def test_what_makes_more_than_it_reads_stays_where_it_is() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, 512)), add_input(b, (512, 512))
    first = b.make("matmul", (x, w), x.shape, x.dtype)
    second = b.make("matmul", (first, w), x.shape, x.dtype)
    wide = b.pointwise("exp", b.broadcast(b.reshape(first, (1, *x.shape)), (8, *x.shape)))
    third = b.make("linear", (wide, w), wide.shape, x.dtype)
    assert order(finish(b, second, third))[:3] == ["matmul", "matmul", "exp"]


def test_an_order_of_sizes_that_vary() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1)), add_input(b, (S1, S1))
    first = b.make("matmul", (x, w), x.shape, torch.float32)
    second = b.make("matmul", (first, w), x.shape, torch.float32)
    # a size that is not known counts as 64: 16 KiB are small
    assert order(finish(b, second, b.pointwise("exp", first))) == ["matmul", "matmul", "exp"]

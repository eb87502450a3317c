# SPDX-License-Identifier: Apache-2.0
"""Reductions over several axes, and those that read one tensor: how many kernels, and their values."""

from collections.abc import Sequence

import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, legalized, new_builder

from blade.backends.disc.cpu.emit.column_blocks import side_by_side
from blade.backends.disc.fusion.build_kernels import build_kernel
from blade.backends.disc.fusion.fuse import FusionGroup, fuse
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.ir.iteration_space import coalesce

Shape = Sequence[int | sympy.Expr]


def sum_graph(shape: Shape, axes: Sequence[int], kind: str = "sum") -> Graph:
    b = new_builder()
    return finish(b, b.reduce(kind, add_input(b, shape), axes))


def spaces(graph: Graph) -> list[list[str]]:
    """The shapes that the kernels walk, one after the other."""
    units = fuse(legalized(graph)).units
    return [[str(d) for d in u.shape] for u in units if isinstance(u, FusionGroup)]


SUMS = [
    ((S0, 64, S1, S2), (0, 2, 3), [["s0", "64", "s1*s2"], ["64", "1", "1", "s0"]]),
    ((S0, S1, S2, 64), (0, 1, 2), [["s0", "s1", "64", "s2"], ["1", "64", "s0*s1"]]),
    ((S0, 7, 7, 1024), (0, 1, 2), [["1024", "49*s0"]]),
    ((S0, S1, 768), (0, 1), [["768", "s0*s1"]]),
    ((S0, 64), (0, 1), [["s0", "64"], ["1", "s0"]]),
    ((S0, 3), (0, 1), [["3*s0"]]),
    ((S0, 6, S1, S2), (2, 3), [["s0", "6", "s1*s2"]]),
    ((S0, 1, S1), (0, 2), [["s0", "1", "s1"], ["1", "1", "s0"]]),
]


@pytest.mark.parametrize(("shape", "axes", "expected"), SUMS, ids=str)
def test_steps(shape: Shape, axes: Sequence[int], expected: list[list[str]]) -> None:
    assert spaces(sum_graph(shape, axes)) == expected


@pytest.mark.parametrize("kind", ["max", "min", "prod", "sum"])
def test_other_kinds_are_split_alike(kind: str) -> None:
    """T5 in float16 asks after each layer whether any element of a whole tensor is infinite."""
    assert spaces(sum_graph((S0, S1, 768), (0, 1, 2), kind)) == [
        ["s0", "s1", "768"],
        ["1", "s0*s1"],
    ]
    if kind == "prod":
        return
    engine = compile_to_engine(sum_graph((S0, S1, 64), (0, 1, 2), kind))
    for sizes in ((3, 5), (1, 1), (40, 33)):
        x = torch.randn(*sizes, 64)
        [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
        torch.testing.assert_close(found.flatten(), getattr(x, kind)()[None])


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize(("shape", "axes"), [s[:2] for s in SUMS], ids=str)
def test_values(shape: Shape, axes: Sequence[int]) -> None:
    engine = compile_to_engine(sum_graph(shape, axes))
    for sizes in [(3, 5, 18), (1, 1, 1), (40, 33, 17), (2, 0, 3), (0, 2, 2)]:
        known = dict(zip((S0, S1, S2), sizes, strict=True))
        x = torch.rand([int(sympy.sympify(d).subs(known)) for d in shape])
        [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
        torch.testing.assert_close(found, x.sum(tuple(axes), keepdim=True))


def test_reductions_of_one_tensor_are_one_kernel() -> None:
    """The gradients of layer norm's weight and bias read the incoming gradient once."""
    b = new_builder()
    g, x = add_input(b, (S0, 96)), add_input(b, (S0, 96))
    both = [b.reduce("sum", v, [0]) for v in (b.pointwise("mul", g, x), g)]
    assert spaces(finish(b, *both)) == [["96", "s0"]]


def test_numbers_of_a_row_do_not_keep_columns_out_of_lanes() -> None:
    """What is one number for a whole row is broadcast; the columns lie side by side all the same."""
    b = new_builder()
    x, mean, scale = (add_input(b, (S0, d)) for d in (96, 1, 1))
    y = b.pointwise(
        "mul", b.pointwise("sub", x, b.broadcast(mean, x.shape)), b.broadcast(scale, x.shape)
    )
    fused = fuse(legalized(finish(b, b.reduce("sum", y, [0]))))
    [group] = [u for u in fused.units if isinstance(u, FusionGroup)]
    assert side_by_side(coalesce(build_kernel(group, fused).kernel)) == 0

# SPDX-License-Identifier: Apache-2.0
"""Concatenations: computed part by part where possible, stored in place, copied only where they must be."""

import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host


def concat(b: IrBuilder, axis: int, *parts: Value) -> Value:
    size = sum(p.shape[axis] for p in parts)  # type: ignore[misc]
    shape = tuple(size if k == axis else d for k, d in enumerate(parts[0].shape))
    return b.make("concat", parts, shape, parts[0].dtype, axis=axis)


def rotate(b: IrBuilder, x: Value) -> Value:
    """Halves of the last axis swapped, the first negated."""
    axis, half = len(x.shape) - 1, x.shape[-1] // 2  # type: ignore[operator]
    first, second = (b.slice(x, axis, k * half, 1, half) for k in range(2))
    return concat(b, axis, b.pointwise("neg", second), first)


def rotary(b: IrBuilder, x: Value, cos: Value, sin: Value) -> Value:
    cos, sin = (b.broadcast(y, x.shape) for y in (cos, sin))
    straight = b.pointwise("mul", x, cos)
    return b.pointwise("add", straight, b.pointwise("mul", rotate(b, x), sin))


def kernels(graph: Graph) -> list[str]:
    """The kernel instructions of the compiled program, by kind."""
    lines = compile_ir(graph, host()).program.splitlines()
    return [line.split()[1].split("_")[0] for line in lines if line.startswith("kernel ")]


def check(graph: Graph, *shapes: tuple[int, ...]) -> None:
    engine = compile_to_engine(graph)
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    found = engine.try_execute(inputs)
    assert found is not None, engine.last_error()
    for have, want in zip(found, interpret(graph, inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=2e-6, atol=2e-6)


def test_a_rotary_embedding_is_one_kernel() -> None:
    b = new_builder()
    x, cos, sin = (add_input(b, shape) for shape in [(S0, S1, 8), (S1, 8), (S1, 8)])
    graph = finish(b, rotary(b, x, cos, sin))
    assert kernels(graph) == ["loop"]
    for s0, s1 in [(1, 1), (3, 5), (0, 2)]:
        check(graph, (s0, s1, 8), (s1, 8), (s1, 8))


def test_a_cache_gets_its_new_rows_without_a_copy_of_them() -> None:
    b = new_builder()
    past, x = add_input(b, (S0, 2, S1, 8)), add_input(b, (S0, 1, 2, 8))
    row = b.permute(b.pointwise("tanh", x), (0, 2, 1, 3))
    graph = finish(b, concat(b, 2, past, row))
    assert sorted(kernels(graph)) == ["copy", "loop"]
    for s0, s1 in [(1, 1), (3, 5), (2, 0)]:
        check(graph, (s0, 2, s1, 8), (s0, 1, 2, 8))


def test_a_rotated_key_goes_straight_into_the_cache() -> None:
    b = new_builder()
    past = add_input(b, (S0, S1, 8))
    x, cos, sin = (add_input(b, shape) for shape in [(S0, 1, 8), (1, 8), (1, 8)])
    graph = finish(b, concat(b, 1, past, rotary(b, x, cos, sin)))
    assert sorted(kernels(graph)) == ["copy", "loop"]
    for s0, s1 in [(1, 1), (3, 5), (2, 0)]:
        check(graph, (s0, s1, 8), (s0, 1, 8), (1, 8), (1, 8))


def test_a_copied_part_of_an_inner_concatenation_goes_to_the_outer_one() -> None:
    b = new_builder()
    x, y, z = (add_input(b, (S0, size)) for size in (3, 4, 5))
    inner = concat(b, 1, x, b.pointwise("tanh", y))
    graph = finish(b, concat(b, 1, z, inner))
    assert sorted(kernels(graph)) == ["copy", "copy", "loop"]
    check(graph, (2, 3), (2, 4), (2, 5))


def test_heads_are_merged_by_the_kernel_before() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, 3, S1, 8)), add_input(b, (5, 24))
    rows = b.permute(b.pointwise("tanh", x), (0, 2, 1, 3))
    product = b.make("linear", (b.reshape(rows, (S0, S1, 24)), w), (S0, S1, 5), x.dtype)
    graph = finish(b, product)
    assert kernels(graph) == ["loop", "matmul"]
    for s0, s1 in [(1, 1), (3, 5), (2, 17)]:
        check(graph, (s0, 3, s1, 8), (5, 24))


def test_a_row_is_not_scattered() -> None:
    """Turning the result of a row kernel is a kernel of its own, in tiles."""
    b = new_builder()
    x = add_input(b, (S0, S1))
    total = b.broadcast(b.reduce("sum", x, [1]), x.shape)
    turned = b.permute(b.pointwise("div", x, total), (1, 0))
    graph = finish(b, b.make("cast", (turned,), turned.shape, x.dtype, output=0))
    assert kernels(graph) == ["row", "loop"]
    check(graph, (5, 7))


def test_what_others_read_too_is_stored_by_itself() -> None:
    b = new_builder()
    x = add_input(b, (S0, 8))
    y = b.pointwise("tanh", x)
    graph = finish(b, concat(b, 0, y, x), b.reduce("sum", b.permute(y, (1, 0)), [1]))
    assert kernels(graph).count("copy") == 1  # of both parts
    check(graph, (5, 8))


def test_one_value_twice_in_a_concatenation_is_copied() -> None:
    b = new_builder()
    y = b.pointwise("tanh", add_input(b, (S0, 8)))
    graph = finish(b, concat(b, 1, y, y))
    assert kernels(graph) == ["loop", "copy"]
    check(graph, (5, 8))


def test_a_concatenation_others_read_is_not_computed_twice() -> None:
    b = new_builder()
    x, y = add_input(b, (S0, 8)), add_input(b, (S1, 8))
    whole = concat(b, 0, b.pointwise("exp", x), b.pointwise("tanh", y))
    total = b.reduce("sum", whole, [1])
    graph = finish(b, b.pointwise("neg", whole), total)
    assert sorted(kernels(graph)) == ["loop", "loop", "loop", "row"]
    check(graph, (5, 8), (3, 8))


def test_a_class_token_meets_the_positions_where_it_is_stored() -> None:
    b = new_builder()
    token, patches = add_input(b, (S0, 1, 8)), add_input(b, (S0, S1, 8))
    positions = add_input(b, (1 + S1, 8))
    whole = concat(b, 1, token, patches)
    graph = finish(b, b.pointwise("add", whole, b.broadcast(positions, whole.shape)))
    assert kernels(graph) == ["loop", "loop"]
    check(graph, (2, 1, 8), (2, 4, 8), (5, 8))

# SPDX-License-Identifier: Apache-2.0
"""What is fused and what is not: decisions, by count and kind."""

import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, legalized, new_builder

from blade.backends.disc.compiler import copies_of
from blade.backends.disc.fusion.build_kernels import join_copies
from blade.backends.disc.fusion.fuse import MOST_TERMS, Fused, FusionGroup, fuse
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.reference.interpret_graph import interpret


def fused(graph: Graph) -> Fused:
    return fuse(legalized(graph))


def kinds(graph: Graph) -> list[str]:
    return [u.kind if isinstance(u, FusionGroup) else u.op for u in fused(graph).units]


def softmax(b: IrBuilder, x: Value) -> Value:
    axis = len(x.shape) - 1
    top = b.broadcast(b.reduce("max", x, [axis]), x.shape)
    e = b.pointwise("exp", b.pointwise("sub", x, top))
    return b.pointwise("div", e, b.broadcast(b.reduce("sum", e, [axis]), x.shape))


def test_pointwise_chain_is_one_loop() -> None:
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S1,))
    z = b.pointwise("mul", b.pointwise("add", x, b.broadcast(y, x.shape)), x)
    assert kinds(finish(b, b.pointwise("tanh", z))) == ["loop"]


def test_softmax_is_one_stitch_group() -> None:
    b = new_builder()
    assert kinds(finish(b, softmax(b, add_input(b, (S0, S1))))) == ["stitch"]


def test_one_reduction_with_neighbours_is_one_row_group() -> None:
    b = new_builder()
    x = add_input(b, (S0, S1))
    norm = b.pointwise("sqrt", b.reduce("sum", b.pointwise("mul", x, x), [1]))
    out = b.pointwise("div", x, b.broadcast(norm, x.shape))
    assert kinds(finish(b, out)) == ["row"]


def test_no_group_waits_for_itself() -> None:
    """x+1 feeds a GEMM whose result meets x+1 again: two kernels, or the first would wait for the GEMM."""
    b = new_builder()
    x, w = add_input(b, (S0, 8)), add_input(b, (8, 8))
    before = b.pointwise("add", x, b.fill(1, x.shape, x.dtype))
    product = b.make("linear", (before, w), x.shape, x.dtype)
    graph = finish(b, b.pointwise("mul", product, before))
    assert kinds(graph) == ["loop", "matmul", "loop"]


def test_no_kernels_wait_for_each_other() -> None:
    """The sum of rows is made of an early value of a kernel that reads, later, what the last kernel makes."""
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S1, S0))
    early = b.pointwise("exp", x)
    rows = b.reduce("sum", b.pointwise("sin", b.permute(early, (1, 0))), [1])
    last = b.pointwise("tanh", y)
    late = b.pointwise("add", early, b.permute(last, (1, 0)))
    out = b.pointwise("mul", last, b.broadcast(rows, last.shape))
    graph = finish(b, late, out)
    made = fused(graph)
    produced: set[int] = set()
    for unit in made.units:
        assert isinstance(unit, FusionGroup)
        assert _reads(unit) & made.stored <= produced
        produced |= {m.id for m in unit.members}
    tensors = [torch.rand(3, 5), torch.rand(5, 3)]
    found = compile_to_engine(graph).try_execute(tensors)
    assert found is not None
    want = interpret(graph, tensors)
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right)


def _reads(unit: FusionGroup) -> set[int]:
    """Ids of values of other units that ``unit`` reads."""
    views = [view_of(a) for m in unit.members for a in m.args]
    return {v.base.id for v in views if v is not None} - {m.id for m in unit.members}


def test_reductions_over_other_rows_are_other_groups() -> None:
    b = new_builder()
    x = add_input(b, (S0, S1))
    rows = b.pointwise("div", x, b.broadcast(b.reduce("sum", x, [1]), x.shape))
    columns = b.reduce("sum", rows, [0])
    assert kinds(finish(b, columns)) == ["row", "row"]


def test_bias_moves_into_the_kernel_that_reads_the_product() -> None:
    b = new_builder()
    x, w, bias = add_input(b, (S0, 8)), add_input(b, (4, 8)), add_input(b, (4,))
    product = b.make("linear", (x, w, bias), (S0, 4), torch.float32)
    result = fused(finish(b, b.pointwise("tanh", product)))
    linear = next(u for u in result.units if isinstance(u, Value))
    assert len(linear.args) == 2
    assert [m.op for m in result.units[-1].members] == ["add", "tanh"]  # type: ignore[union-attr]


def test_bias_stays_where_the_product_is_returned() -> None:
    b = new_builder()
    x, w, bias = add_input(b, (S0, 8)), add_input(b, (4, 8)), add_input(b, (4,))
    graph = finish(b, b.make("linear", (x, w, bias), (S0, 4), torch.float32))
    linear = fused(graph).units[0]
    assert isinstance(linear, Value) and len(linear.args) == 3


def test_only_what_others_read_is_stored() -> None:
    b = new_builder()
    x = add_input(b, (S0, S1))
    a = b.pointwise("exp", x)
    c = b.pointwise("add", a, x)
    result = fused(finish(b, c))
    stored = {m.op for u in result.units if isinstance(u, FusionGroup) for m in u.members}
    assert stored == {"exp", "add"}
    assert [v.op for v in result.graph.values if v.id in result.stored] == ["add"]


def test_copies_of_one_size_are_one_kernel() -> None:
    """Two caches that grow by as much; a copy of what another one writes comes after it."""
    b = new_builder()
    x, y, z = (add_input(b, (S0, S1, 24)) for _ in range(3))
    shape = (S0, S1 + S1, 24)
    one = b.make("concat", (x, y), shape, torch.float32, axis=1)
    two = b.make("concat", (y, z), shape, torch.float32, axis=1)
    again = b.make("concat", (b.slice(one, 1, 1, 1, S1), z), shape, torch.float32, axis=1)
    graph = finish(b, one, two, again)
    whole = fuse(graph)
    copies = [c for u in whole.units if isinstance(u, Value) for c in copies_of(u, whole)]
    kernels = join_copies(copies)
    assert [len(k.kernel.body) for k in kernels] == [10, 2]
    given = [torch.randn(2, 3, 24) for _ in range(3)]
    got = compile_to_engine(graph).try_execute(given)
    want = interpret(graph, given)
    for have, wanted in zip(got, want, strict=True):
        assert torch.equal(have, wanted)


def shared_weight(layers: int) -> Graph:
    """The gradients of a weight and a bias that all ``layers`` share, each of which reads the one before."""
    b = new_builder()
    y, w = add_input(b, (1, S0, 64)), add_input(b, (1, 64, 64))
    weight = bias = None
    for _ in range(layers):
        y = b.pointwise("tanh", b.make("matmul", (y, w), (1, S0, 64), torch.float32))
        turned = b.permute(y, (0, 2, 1))
        of_weight = b.make("matmul", (turned, y), (1, 64, 64), torch.float32)
        of_bias = b.reduce("sum", turned, [2])
        weight = of_weight if weight is None else b.pointwise("add", weight, of_weight)
        bias = of_bias if bias is None else b.pointwise("add", bias, of_bias)
    assert weight is not None and bias is not None
    return finish(b, weight, bias)


def test_a_long_sum_does_not_wait_for_all_of_its_terms() -> None:
    units = fuse(legalized(shared_weight(12))).units
    place = {u.id: i for i, u in enumerate(units) if isinstance(u, Value)}
    sums = [
        u for u in units if isinstance(u, FusionGroup) and any(m.op == "add" for m in u.members)
    ]
    assert len(sums) >= 2 * 12 // MOST_TERMS
    for one in sums:
        read = {a.id for m in one.members for a in m.args if a.id in place}
        assert len(read) <= MOST_TERMS
    assert units.index(sums[0]) < max(place.values()) / 2


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_long_sum_has_the_same_value() -> None:
    engine = compile_to_engine(shared_weight(11))
    y, w = torch.randn(5, 64), torch.randn(64, 64) / 8
    weight, bias = torch.zeros(64, 64), torch.zeros(64)
    found = engine.try_execute([y[None], w[None]]) or pytest.fail(engine.last_error())
    for _ in range(11):
        y = torch.tanh(y @ w)
        weight, bias = weight + y.t() @ y, bias + y.sum(0)
    torch.testing.assert_close(found[0][0], weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].flatten(), bias, rtol=1e-4, atol=1e-4)


def test_a_sum_over_layers_comes_when_the_last_layer_does() -> None:
    """What reads a layer, as the gradient of its weight does, comes before the next layer."""
    b = new_builder()
    y = total = add_input(b, (S0, 64))
    readers = []
    for _ in range(3):
        layer, reader = add_input(b, (64, 64)), add_input(b, (64, 32))
        y = b.make("matmul", (y, layer), y.shape, y.dtype)
        total = b.pointwise("add", total, y)
        readers.append(b.make("matmul", (y, reader), (S0, 32), y.dtype))
    units = fused(finish(b, total, *readers)).units
    assert sum(isinstance(u, FusionGroup) for u in units) == 1
    widths = [u.shape[-1] for u in units if isinstance(u, Value)]
    assert widths == [64, 32] * 3


def test_a_group_that_reads_such_a_sum_does_not_bring_it_forward() -> None:
    """Products with one factor are one kernel, and a long sum of them several: all wait for the last product."""
    b = new_builder()
    y = add_input(b, (S0, 64))
    slope = b.pointwise("tanh", add_input(b, (S0, 64)))
    readers, total = [], None
    for _ in range(2 * MOST_TERMS):
        layer, reader = add_input(b, (64, 64)), add_input(b, (64, 32))
        y = b.make("matmul", (y, layer), y.shape, y.dtype)
        term = b.pointwise("mul", y, slope)
        total = term if total is None else b.pointwise("add", total, term)
        readers.append(b.make("matmul", (y, reader), (S0, 32), y.dtype))
    assert total is not None
    units = fused(finish(b, total, *readers)).units
    widths = [u.shape[-1] for u in units if isinstance(u, Value)]
    assert widths == [64, 32] * (2 * MOST_TERMS)

# SPDX-License-Identifier: Apache-2.0
"""Which products of one operand become one, and that the merged graph still means the same."""

import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.passes.merge_linears import FAR, merge_linears
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host


class Weights:
    """Constants of a graph under construction."""

    def __init__(self, b: IrBuilder) -> None:
        self.b = b
        self.tensors: list[torch.Tensor] = []

    def add(self, *shape: int, transposed: bool = False) -> Value:
        tensor = torch.randn(*reversed(shape)).t() if transposed else torch.randn(*shape)
        self.tensors.append(tensor)
        index, strides = len(self.tensors) - 1, tuple(tensor.stride())
        return self.b.make("const", (), shape, torch.float32, strides, index=index)

    def linear(self, x: Value, columns: int, bias: bool = True, transposed: bool = False) -> Value:
        depth = x.shape[-1]
        assert isinstance(depth, int)
        args = [x, self.add(columns, depth, transposed=transposed)]
        args += [self.add(columns)] if bias else []
        return self.b.make("linear", args, (*x.shape[:-1], columns), x.dtype)


def linears(graph: Graph) -> list[Value]:
    return [v for v in merge_linears(graph).values if v.op == "linear"]


def check(graph: Graph, *sizes: tuple[int, int]) -> None:
    merged = merge_linears(graph)
    for s0, s1 in sizes:
        x = [torch.randn(s0, s1, 24)]
        for have, want in zip(interpret(merged, x), interpret(graph, x), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def heads(b: IrBuilder, v: Value) -> Value:
    """[s0, s1, 24] -> [s0, 3, s1, 8]."""
    return b.permute(b.reshape(v, (S0, S1, 3, 8)), (0, 2, 1, 3))


def test_three_projections_of_one_operand_are_one_product() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    q, k, v = (w.linear(x, 24) for _ in range(3))
    out = b.pointwise(
        "add", b.pointwise("tanh", heads(b, q)), b.pointwise("mul", *map(heads, [b, b], [k, v]))
    )
    graph = finish(b, out, constants=w.tensors)
    assert [str(v.shape) for v in linears(graph)] == ["(s0, s1, 72)"]
    check(graph, (2, 5), (1, 1), (0, 3))


def test_gate_and_up_are_one_product_of_different_widths_and_layouts() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    gate, up = w.linear(x, 40, bias=False, transposed=True), w.linear(x, 40, bias=False)
    narrow = w.linear(x, 8, bias=False)
    out = b.pointwise("mul", b.pointwise("sigmoid", gate), up)
    graph = finish(b, out, b.pointwise("neg", narrow), constants=w.tensors)
    assert [v.shape[-1] for v in linears(graph)] == [88]
    check(graph, (3, 4))


def test_results_of_another_dtype_are_apart() -> None:
    """With enable_bf16 a query that is scaled in float32 is one; keys and values are rounded where they are made."""
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24), torch.bfloat16), Weights(b)
    args = [[x, w.add(24, 24)] for _ in range(3)]
    q = b.make("linear", args[0], (S0, S1, 24), torch.float32)
    k, v = (b.make("linear", a, (S0, S1, 24), torch.bfloat16) for a in args[1:])
    out = b.pointwise("mul", k, v)
    graph = finish(b, b.pointwise("tanh", q), out, constants=w.tensors)
    assert [(y.shape[-1], y.dtype) for y in linears(graph)] == [
        (24, torch.float32),
        (48, torch.bfloat16),
    ]


def test_zeros_have_the_dtype_of_a_bias() -> None:
    """Not of the result: Whisper's keys have no bias, its values a float32 one, and both are rounded."""
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24), torch.bfloat16), Weights(b)
    without, others = [x, w.add(24, 24)], [x, w.add(24, 24), w.add(24)]
    k, v = (b.make("linear", a, (S0, S1, 24), torch.bfloat16) for a in (without, others))
    graph = finish(b, b.pointwise("mul", k, v), constants=w.tensors)
    [merged] = linears(graph)
    assert [p.dtype for p in (merged.args[2], *merged.args[2].args)] == [torch.float32] * 3
    data = torch.randn(2, 5, 24).bfloat16()
    engine = compile_to_engine(graph)
    [got] = engine.try_execute([data]) or pytest.fail(engine.last_error())
    keys, values, bias = (t.bfloat16().double() for t in w.tensors)
    wanted = (data.double() @ keys.mT) * (data.double() @ values.mT + bias)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=5e-2)


def test_a_product_without_bias_gets_zeros_beside_those_with_one() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    parts = [w.linear(x, 24, bias=bias) for bias in (True, False, True)]
    graph = finish(b, *(b.pointwise("tanh", p) for p in parts), constants=w.tensors)
    assert [v.shape[-1] for v in linears(graph)] == [72]
    check(graph, (2, 2))


def test_a_result_the_caller_owns_is_not_a_slice() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    a, c = w.linear(x, 24), w.linear(x, 24)
    graph = finish(b, a, heads(b, c), constants=w.tensors)
    assert [v.shape[-1] for v in linears(graph)] == [24, 24]


def test_a_product_far_from_the_other_stays_there() -> None:
    """Its result would wait in memory for the reader."""
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    early = b.pointwise("tanh", w.linear(x, 24))
    between = w.linear(early, 24)
    late = b.pointwise("mul", between, w.linear(x, 24))
    graph = finish(b, late, constants=w.tensors)
    assert [v.shape[-1] for v in linears(graph)] == [24, 24, 24]


def test_a_reader_that_would_need_a_copy_keeps_the_product_apart() -> None:
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    a, c = w.linear(x, 24), w.linear(x, 24)
    flat = b.pointwise("tanh", b.reshape(a, (S0, 24 * S1)))
    graph = finish(b, flat, b.pointwise("tanh", c), constants=w.tensors)
    assert [v.shape[-1] for v in linears(graph)] == [24, 24]


@pytest.mark.needs("torch_mlir")
@pytest.mark.parametrize("sizes", [(1, 1), (2, 7), (3, 40)])
def test_the_compiled_program_has_one_product(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    q, k = w.linear(x, 24), w.linear(x, 40, bias=False, transposed=True)
    graph = finish(b, b.pointwise("tanh", q), b.pointwise("exp", k), constants=w.tensors)
    program = compile_ir(graph, host()).program
    assert program.count("kernel gemm") == 1
    assert "concat" not in program
    engine = compile_to_engine(graph)
    inputs = [torch.randn(*sizes, 24)]
    found = engine.try_execute(inputs)
    assert found is not None, engine.last_error()
    for have, want in zip(found, interpret(graph, inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [FAR - 1, FAR])
def test_what_all_layers_are_told_is_one_product_where_asked(layers: int) -> None:
    """``x`` is read by a product in every layer, with that layer's own products between them."""
    b = new_builder()
    x, w = add_input(b, (S0, S1, 24)), Weights(b)
    y = x
    for _ in range(layers):
        y = b.pointwise("add", w.linear(b.pointwise("tanh", y), 24), w.linear(x, 24, bias=False))
    graph = finish(b, y, constants=w.tensors)
    merged = merge_linears(graph, far=True)
    products = [v for v in merged.values if v.op == "linear"]
    told = 1 if layers >= FAR else layers
    assert len(products) == layers + told and len(linears(graph)) == 2 * layers
    given = [torch.randn(2, 5, 24)]
    for have, want in zip(interpret(merged, given), interpret(graph, given), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)

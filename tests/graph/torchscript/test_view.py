# SPDX-License-Identifier: Apache-2.0
"""What is a node, what an edge, what must keep its order, what nobody may take."""

from typing import Any

import torch
from cutting import assert_fx_same, cut, ops, pins, script, trace
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import blade
from blade.core.cluster import ValueInfo, makes_sizes
from blade.core.reason import Code
from blade.graph.torchscript.view import view

A = torch.ops.aten


def test_sizes_are_not_nodes_and_edges_pass_through_them() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x)
        return y.expand(a.shape[0], a.shape[1]).contiguous()

    seen = view(trace(model, (torch.randn(2, 4), torch.randn(4))))
    assert [n.target for n in seen.nodes] == [
        A.relu.default,
        A.expand.default,
        A.contiguous.default,
    ]
    assert seen.edges == ((0, 1, 8), (1, 2, 2 * 4 * 4))


def test_arguments_are_bound_to_the_schema() -> None:
    seen = view(trace(lambda x: x.to(torch.bool).sum(dim=[0], keepdim=True), (torch.ones(3, 5),)))
    cpu = torch.device("cpu")
    to, total = seen.nodes
    assert to.args[1] is torch.bool
    assert total.args == (ValueInfo("tensor", torch.bool, cpu, 2), [0], True)
    assert total.kwargs == {"dtype": None}
    assert total.outputs == (ValueInfo("tensor", torch.int64, cpu, 2),)
    assert "test_view.py:" in total.source


def test_a_rank_that_samples_disagree_on_is_unknown() -> None:
    captured = trace(lambda x: torch.relu(x), (torch.randn(2, 3),), (torch.randn(4, 5, 6),))
    assert pins(captured) == {"aten::relu": Code.UNKNOWN_TYPE}


def test_chunk_and_its_unpacking_are_one_node() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.chunk(x * 2, 2, -1)
        return a * torch.sigmoid(b)

    seen = view(trace(model, (torch.randn(3, 8),)))
    assert [str(n.target) for n in seen.nodes] == [
        "aten.mul.Tensor",
        "aten.chunk.default",
        "aten.sigmoid.default",
        "aten.mul.Tensor",
    ]
    assert len(seen.nodes[1].outputs) == 2
    assert not seen.excluded


def test_integer_chains_on_traced_sizes_are_scalars() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return torch.relu(y)[:, : half + 1]

    captured = trace(model, (torch.randn(2, 6), torch.randn(2, 9)))
    assert ops(cut(captured)) == [["relu", "slice", "slice"]]


def _number(size: int) -> torch.Tensor:
    """``size`` as the tracer has it, also outside of a trace."""
    return size if isinstance(size, torch.Tensor) else torch.tensor(size)


def test_quotients_and_conversions_of_sizes_are_scalars() -> None:
    def model(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        half = torch.div(_number(x.shape[1]), 2, rounding_mode="trunc")
        below = torch.div(1 - _number(x.shape[1]), 2, rounding_mode="trunc")
        a = torch.relu(y)[:, : half.to(torch.int64)]
        return torch.tanh(a)[:, below:]

    captured = trace(model, (torch.randn(2, 9), torch.randn(2, 6)), (torch.ones(3, 9),) * 2)
    assert not pins(captured)
    [extracted] = cut(captured)
    for inputs in (*captured.samples, *captured.probes):
        torch.testing.assert_close(extracted.fallback(*inputs), model(*inputs))
        torch.testing.assert_close(extracted.cluster.gm(*inputs)[0], model(*inputs))


def test_a_slice_around_the_middle_has_a_size_that_sizes_tell() -> None:
    def model(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        return torch.relu(table)[8 - length : 8 + length]

    captured = trace(
        model, (torch.randn(3), torch.randn(16, 2)), (torch.ones(5), torch.ones(16, 2))
    )
    [extracted] = cut(captured)
    [returned] = extracted.cluster.gm.graph.output_node().args[0]
    assert not free_unbacked_symbols(returned.meta["val"])


def test_a_quotient_that_is_not_rounded_stays_an_op() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(y)[:, : (_number(x.shape[1]) / 2).to(torch.int64)]

    captured = trace(model, (torch.randn(2, 6), torch.randn(2, 9)))
    seen = view(captured)
    assert any(node.target is torch.ops.aten.div.Tensor for node in seen.nodes)
    assert any(makes_sizes(node) for node in seen.nodes)  # its result is read
    assert_fx_same(cut(captured))


class Returning(torch.nn.Module):
    """Scripted, its first return leaves later values without any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if x.size(0) > 2:
                return torch.relu(x)
            x = torch.tanh(x) * 2
        return x


def test_values_that_are_never_made_are_not_looked_at() -> None:
    captured = script(Returning(), (torch.randn(3, 4),), (torch.randn(2, 4),))
    assert any(node.kind() == "prim::Uninitialized" for node in captured.module.graph.nodes())
    assert {str(n.target) for n in view(captured).nodes} >= {"aten.relu.default"}


def test_a_float_chain_stays_a_chain_of_ops() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.tensor(x.shape[-1]) if False else torch.as_tensor(x.shape[-1]))

    captured = trace(model, (torch.randn(2, 9),), (torch.randn(3, 16),))
    [extracted] = cut(captured)
    for inputs in (*captured.samples, *captured.probes):
        torch.testing.assert_close(extracted.cluster.gm(*inputs)[0], model(*inputs))


class Counted(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(y)[: int(x.sum())]


class Deciding(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = int(x.sum())
        return torch.relu(y)[:n] if n > 1 else y


def test_an_int_that_only_becomes_a_size_is_read_where_it_is_needed() -> None:
    captured = script(Counted(), (torch.ones(2), torch.randn(4)))
    assert not pins(captured)
    [extracted] = cut(captured)
    assert sorted(*ops([extracted])) == ["relu", "slice", "sum"]
    assert_fx_same([extracted])
    assert [makes_sizes(n) for n in view(captured).nodes if "slice" in n.name] == [True]


def test_an_int_that_decides_is_data_dependent() -> None:
    found = pins(script(Deciding(), (torch.ones(2), torch.randn(4))))
    assert found["aten::Int"] == found["aten::slice"] == Code.DATA_DEPENDENT


def test_masks_and_nonzero_make_sizes_but_index_tensors_do_not() -> None:
    def made(model: Any, *inputs: torch.Tensor) -> list[str]:
        return [str(n.target) for n in view(trace(model, inputs)).nodes if makes_sizes(n)]

    x = torch.randn(4, 3)
    assert made(lambda v: v[v > 0], x) == ["aten.index.Tensor"]
    assert made(lambda v: torch.nonzero(v), x) == ["aten.nonzero.default"]
    assert made(lambda v: torch.where(v > 0)[0], x) == ["aten.where.default"]
    assert not made(lambda v, i: (v * 2)[i], x, torch.tensor([0, 2]))
    assert not made(lambda v: torch.where(v > 0, v, 1), x)


def test_random_ops_are_pinned_and_keep_their_order() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(x, 0.5, True)
        b = torch.rand_like(x)
        return torch.nn.functional.dropout(a + b, 0.0, True)

    seen = view(trace(model, (torch.randn(3),)))
    kinds = [str(n.target) for n in seen.nodes]
    codes = {kinds[i]: r.code for i, r in seen.excluded.items()}
    assert codes == {"aten.dropout.default": Code.RANDOM, "aten.rand_like.default": Code.RANDOM}
    first, second = kinds.index("aten.dropout.default"), kinds.index("aten.rand_like.default")
    assert (first, second) in seen.effects


def test_attention_without_dropout_is_not_random() -> None:
    q = torch.randn(1, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert not pins(trace(lambda x: attend(x, x, x), (q,)))
    assert pins(trace(lambda x: attend(x, x, x, dropout_p=0.1), (q,))) == {
        "aten::scaled_dot_product_attention": Code.RANDOM
    }


def test_a_write_orders_its_readers_before_and_after() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.sin(x)
        x.add_(1)
        return before, torch.cos(x)

    seen = view(trace(model, (torch.randn(3),)))
    names = [str(n.target) for n in seen.nodes]
    sin, add, cos = (
        names.index(f"aten.{n}") for n in ("sin.default", "add_.Tensor", "cos.default")
    )
    assert (sin, add) in seen.effects
    assert seen.excluded[add].code == Code.MUTATES
    # torch.jit.trace may read the input itself after the write, or what add_ returns.
    assert (add, cos) in seen.effects or (add, cos) in [(a, b) for a, b, _ in seen.edges]


def test_views_of_what_is_written_are_pinned() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        v = a.view(-1)
        v.add_(1)
        return torch.relu(a)

    found = pins(trace(model, (torch.randn(2, 3),)))
    assert found["aten::view"] == Code.ALIASES
    assert found["aten::add_"] == Code.MUTATES
    assert found["aten::mul"] == Code.ALIASES
    assert "aten::relu" not in found


def test_views_of_inputs_that_are_returned_are_pinned() -> None:
    found = pins(trace(lambda x: (x.view(-1), torch.relu(x).view(-1)), (torch.randn(2, 3),)))
    assert found == {"aten::view": Code.ALIASES}
    seen = view(trace(lambda x: (x.view(-1), torch.relu(x).view(-1)), (torch.randn(2, 3),)))
    assert len(seen.excluded) == 1


def test_results_that_alias_each_other_are_pinned_at_the_view() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.relu(x)
        return a, a.t()

    assert pins(trace(model, (torch.randn(2, 3),))) == {"aten::t": Code.ALIASES}


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.relu(x)
        if n > 2:
            y = y * 2
        for i in range(n):
            y = y + i
        return torch.sigmoid(y)


def test_control_flow_is_a_node_nobody_takes() -> None:
    seen = view(script(Branching(), (torch.randn(3), 4)))
    kinds = [seen.program.lines[u.lines[0]].kind for u in seen.units]
    assert kinds == [
        "aten::relu",
        "prim::If",
        "aten::mul",
        "prim::Loop",
        "aten::add",
        "aten::sigmoid",
    ]
    assert seen.blocks == ((0, 1, 3, 5), (2,), (), (4,))
    assert {kinds[i] for i in seen.excluded} == {"prim::If", "prim::Loop"}
    assert [(a, b) for a, b, _ in seen.edges] == [(0, 1), (1, 3), (3, 5)]


def test_a_result_that_is_left_undefined_is_no_obstacle() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.mix(x, x, x, need_weights=False)[0]
            return mixed * 2

    model, x = Mixed().eval(), torch.randn(3, 5, 8)
    optimized = blade.optimize(model, x, blade.Config(timing=False, min_cluster_size=1))
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))

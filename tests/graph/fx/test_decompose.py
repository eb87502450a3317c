# SPDX-License-Identifier: Apache-2.0
"""Ops replaced by their parts: the same values at every size, and only what has to be is replaced."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cutting import cut, trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.shared.onnx.exporter import reduce
from blade.graph.fx.decompose import decompose
from blade.graph.fx.exported_program import to_exported

pytestmark = pytest.mark.needs("onnx")
KERNEL, TABLE = torch.randn(5, 3, 3, 3), torch.randn(16, 4)
Make = Callable[[int, int], Sequence[torch.Tensor]]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q * 1, k, v, attn_mask=mask) + 0


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q * 1, k, v, is_causal=True, scale=0.3) + _.sum()


def attention_inputs(batch: int, length: int) -> Sequence[torch.Tensor]:
    q, k, v = torch.randn(3, batch, 2, length, 4).unbind(0)
    mask = torch.rand(batch, 1, length, length) < 0.7
    mask[0, 0, 0] = False  # nothing to attend to
    return q, k, v, mask


def convolved(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.conv2d(x, KERNEL, padding=1)
    return torch.nn.functional.adaptive_avg_pool2d(y.relu(), 1)


def images(batch: int, size: int) -> Sequence[torch.Tensor]:
    return (torch.randn(batch, 3, size + 3, 7),)


def looked_up(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids * 1, TABLE).tanh()


def tokens(batch: int, length: int) -> Sequence[torch.Tensor]:
    return (torch.randint(0, 16, (batch, length)),)


CASES: list[tuple[Callable[..., Any], Make]] = [
    (attend, attention_inputs),
    (causal, attention_inputs),
    (convolved, images),
    (looked_up, tokens),
]


@pytest.mark.parametrize(("function", "make"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_the_parts_give_the_same_values(function: Callable[..., Any], make: Make) -> None:
    [extracted] = cut(trace(function, tuple(make(2, 5)), tuple(make(3, 6))))
    program = to_exported(extracted.cluster, reduce=reduce)
    for size in ((2, 5), (3, 8), (1, 1), (1, 4)):
        inputs = make(*size)
        [got], [want] = program.module()(*inputs), extracted.cluster.gm(*inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_translated_is_left_alone() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.linear(x, torch.ones(4, 4)).softmax(-1)
        return torch.nn.functional.layer_norm(h, (4,)).to("cpu", torch.float32) + 1

    [extracted] = cut(trace(model, (torch.randn(3, 4),), (torch.randn(5, 4),)))
    program = to_exported(extracted.cluster, reduce=reduce)
    targets = {str(n.target) for n in program.graph.nodes}
    assert {"aten.linear.default", "aten.softmax.int", "aten.layer_norm.default"} <= targets
    assert not any(".to." in t for t in targets)


def test_a_negative_index_becomes_one_that_is_out_of_range() -> None:
    [extracted] = cut(trace(looked_up, tuple(tokens(2, 5)), tuple(tokens(3, 6))))
    module = to_exported(extracted.cluster, reduce=reduce).module()
    with pytest.raises(IndexError):
        module(torch.tensor([[-1]]))


def test_nodes_that_share_what_is_known_of_them_stay_apart() -> None:
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = [graph.call_function(torch.ops.aten.clone.default, (one,)) for one in (x, y)]
    stack = graph.call_function(torch.ops.aten.stack.default, ([*both, x],))
    with mode:
        x.meta["val"], y.meta["val"], shared = (torch.empty(2) for _ in range(3))
        stack.meta["val"] = torch.empty(3, 2)
    for one in both:
        one.meta["val"] = shared
    graph.output(stack)
    is_known = {torch.ops.aten.clone.default, torch.ops.aten.unsqueeze.default}.__contains__
    decompose(graph, is_known, torch._decomp.core_aten_decompositions(), {})
    targets = {node.target for node in graph.nodes}
    assert torch.ops.aten.cat.default in targets and torch.ops.aten.stack.default not in targets
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    a, b = torch.randn(2), torch.randn(2)
    torch.testing.assert_close(module(a, b), torch.stack([a, b, a]))

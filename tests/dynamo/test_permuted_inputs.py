# SPDX-License-Identifier: Apache-2.0
"""Inputs of a graph whose axes lie in another order than they are counted: engines get them as they lie."""

import torch

import blade
from blade.dynamo.live_graphs import live_graphs


def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(x) * 2 + y, -1).transpose(1, 2) + 1


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, 4, 5, generator=generator).transpose(1, 2)
    return x, torch.randn(3, 4, 8, 5, generator=generator)


def test_an_input_crosses_in_memorys_order() -> None:
    before = {graph.name for graph in live_graphs()}
    run = torch.compile(
        function, backend=blade.dynamo.disc, options={"timing": False, "strict": True}
    )
    for seed in range(3):
        x, y = inputs(seed)
        torch.testing.assert_close(run(x, y), function(x, y))
    (graph,) = [g for g in live_graphs() if g.name not in before]
    (part,) = graph.parts
    assert part.cut is not None and part.served is not None
    assert part.cut.orders == {0: (0, 2, 1, 3)}
    assert part.cut.cluster.inputs[0].shape == (3, 8, 4, 5)
    assert part.served.serving == "disc"
    assert part.served.engine().stats()["engine_runs"] >= 3


def test_a_slice_crosses_in_memorys_order() -> None:
    """Results lie as the slice does, without its gaps: as the gradient of attention, which is then viewed."""
    before = {graph.name for graph in live_graphs()}

    def heads_in_one(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).transpose(1, 2).view(3, 8, 20).softmax(-1)

    options = {"timing": False, "strict": True, "min_cluster_size": 1}
    run = torch.compile(heads_in_one, backend=blade.dynamo.disc, options=options)
    for seed in range(3):
        x = torch.cat([inputs(seed)[0].transpose(1, 2)] * 3, -1).transpose(1, 2)[..., 5:10]
        torch.testing.assert_close(run(x), heads_in_one(x))
    (graph,) = [g for g in live_graphs() if g.name not in before]
    (part,) = graph.parts
    assert part.cut is not None and part.served is not None
    assert part.cut.orders == {0: (0, 2, 1, 3)}
    assert part.served.serving == "disc"


def test_one_that_lies_otherwise_at_another_call_is_computed_with_as_well() -> None:
    run = torch.compile(function, backend=blade.dynamo.disc, options={"timing": False})
    x, y = inputs(1)
    want = function(x, y)
    torch.testing.assert_close(run(x, y), want)
    torch.testing.assert_close(run(x.contiguous(), y), want)
    torch.testing.assert_close(run(x, y.transpose(0, 3).contiguous().transpose(0, 3)), want)


def test_what_forward_saves_for_its_gradient_in_another_order() -> None:
    before = {graph.name for graph in live_graphs()}
    into = torch.nn.Linear(16, 48)
    x = torch.randn(2, 8, 16, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = into(x).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q.sin(), k, v).sum()

    run = torch.compile(attend, backend=blade.dynamo.aot_disc, options={"timing": False})
    for _ in range(2):
        (want,) = torch.autograd.grad(attend(x), x)
        (got,) = torch.autograd.grad(run(x), x)
        torch.testing.assert_close(got, want)
    backward = next(g for g in live_graphs() if g.name not in before and "backward" in g.name)
    assert any(part.cut is not None and part.cut.orders for part in backward.parts)
    assert {part.served.serving for part in backward.parts if part.served} == {"disc"}


def test_an_input_that_is_returned_is_the_callers() -> None:
    run = torch.compile(
        lambda x, y: (x, x.transpose(1, 2), torch.exp(x) + y),
        backend=blade.dynamo.disc,
        options={"timing": False, "min_cluster_size": 1},
    )
    x, y = inputs(2)
    for _ in range(2):
        same, turned, _ = run(x, y)
        assert same.data_ptr() == turned.data_ptr() == x.data_ptr()
        assert same.stride() == x.stride()

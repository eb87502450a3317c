# SPDX-License-Identifier: Apache-2.0
"""Dropout within engines on CUDA: eager's numbers for eager's seed, other ones at every replay of a graph."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend

import blade
from blade.dynamo.live_graphs import live_graphs, stats_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("runtime"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Block = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers(torch.nn.Module):
    """Dropout before and after attention that drops, too."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256)
        self.norm = torch.nn.LayerNorm(256)
        self.drop, self.rate = torch.nn.Dropout(dropout), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = self.into(self.drop(x)).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.rate)
            y = self.out(y.transpose(1, 2).reshape(x.shape))
            x = self.norm(x + self.drop(torch.tanh(y)))
        return x


class Masked(torch.nn.Module):
    """Nothing but dropout: which elements are dropped can be seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2 + 1, 0.5, training=True) * 3


def step(model: torch.nn.Module, run: Block, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients of one training step."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = run(x)
    y.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    assert x.grad is not None and all(g is not None for g in gradients)
    return [y.detach(), x.grad, *(g for g in gradients if g is not None)]


def served(since: set[str]) -> list[str]:
    graphs = [graph for graph in live_graphs() if graph.name not in since]
    return [c.backend for graph in graphs for c in graph.report().clusters]


def names() -> set[str]:
    return {graph.name for graph in live_graphs()}


def test_graphs_of_one_program_after_another() -> None:
    """Whose pools of memory torch keeps by name, pinned memory's too."""
    x = torch.randn(4, 48, 256, device="cuda")
    for _ in range(3):
        torch._dynamo.reset()
        gc.collect()  # the graphs of the program before
        model = Layers().cuda()
        run = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
        before = names()
        for _ in range(4):
            step(model, run, x)
        counts = [c for g in live_graphs() if g.name not in before for c in stats_of(g).values()]
        assert counts and all(c["graph_replays"] and not c["graph_failures"] for c in counts), (
            counts
        )
        del model, run


def test_steps_are_eagers_with_eagers_seed() -> None:
    torch.manual_seed(0)
    before, model = names(), Layers().cuda()
    run = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    x = torch.randn(4, 48, 256, device="cuda")
    for seed in (1, 2, 3, 1, 4):  # launch by launch, captured, replayed
        torch.manual_seed(seed)
        want = [step(model, model, x) for _ in range(2)]
        state = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        got = [step(model, run, x) for _ in range(2)]
        assert torch.equal(torch.cuda.get_rng_state(), state), seed
        pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a, b, strict=True)]
        for a, b in pairs:
            scale = float(b.abs().max())
            torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=5e-2)
    assert set(served(before)) == {"disc"}
    graphs = [g for g in live_graphs() if g.name not in before]
    assert len(graphs) == 2
    q = torch.empty(4, 4, 48, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    whole = torch._fused_sdp_choice(q, q, q, dropout_p=0.2) == SDPBackend.CUDNN_ATTENTION.value
    for graph in graphs:
        assert len(stats_of(graph)) == 1 or not whole  # other kernels of attention stay outside
        counts = next(iter(stats_of(graph).values()))
        assert counts["graph_failures"] == 0 and counts["fallbacks"] == 0, counts
        assert counts["graph_replays"] > 0, counts


def test_every_replay_draws_other_numbers_and_a_seed_the_same() -> None:
    before, model = names(), Masked().cuda()
    run = torch.compile(
        model, backend=blade.dynamo.aot_disc, options={"timing": False, "min_cluster_size": 1}
    )
    x = torch.rand(64, 64, device="cuda", requires_grad=True)

    def masks() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [run(x).detach() != 0 for _ in range(6)]

    first, second = masks(), masks()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    torch.manual_seed(7)
    eager = [model(x).detach() != 0 for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(first, eager, strict=True))
    forward = next(g for g in live_graphs() if g.name not in before and "forward" in g.name)
    (counts,) = stats_of(forward).values()
    assert counts["graph_replays"] > 0 and counts["graph_failures"] == 0, counts


def test_drawing_graphs_of_two_shapes_take_turns_with_eager_draws() -> None:
    model = Masked().cuda()
    run = torch.compile(
        model,
        backend=blade.dynamo.aot_disc,
        dynamic=True,
        options={"timing": False, "min_cluster_size": 1},
    )
    shapes = [(8, 33), (16, 40), (8, 33), (16, 40), (8, 33), (16, 40)]
    given = [torch.rand(s, device="cuda", requires_grad=True) for s in shapes]
    torch.manual_seed(3)
    got = [(run(x).detach(), torch.rand(5, device="cuda")) for x in given]
    torch.manual_seed(3)
    want = [(model(x).detach(), torch.rand(5, device="cuda")) for x in given]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[1], b[1])
        torch.testing.assert_close(a[0], b[0])


def test_a_graph_that_is_dropped_leaves_the_generator_as_it_is() -> None:
    """Its pool and its place in the generator go with it; others are captured afterwards."""
    x = torch.rand(32, 32, device="cuda", requires_grad=True)
    for _ in range(3):
        torch._dynamo.reset()
        model = Masked().cuda()
        run = torch.compile(
            model, backend=blade.dynamo.aot_disc, options={"timing": False, "min_cluster_size": 1}
        )
        for seed in range(4):
            torch.manual_seed(seed)
            got = run(x).detach()
            torch.manual_seed(seed)
            torch.testing.assert_close(got, model(x).detach())
        del run

# SPDX-License-Identifier: Apache-2.0
"""``aot_disc``: what a training loop does besides forward and backward, held against eager."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from two_processes import train_together

import blade
from blade.dynamo.cluster_module import FxClusterModule


class Net(nn.Module):
    """Dropout, batch norm, a parameter used twice, one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(functional.gelu(self.norm(self.first(x))), 0.2, self.training)
        return (self.second(y) @ self.first.weight.T).tanh()


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, its copy for eager, and the compiled form of the first."""
    other = copy.deepcopy(model)
    return (
        model,
        other,
        torch.compile(model, backend=blade.dynamo.aot_disc, options=options or None),
    )


def same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def both(model: nn.Module, other: nn.Module, run: Any, step: Callable[[Any], Any]) -> None:
    """``step`` on the compiled form and on eager, from the same state of the generator."""
    torch.manual_seed(5)
    got = step(run)
    torch.manual_seed(5)
    want = step(other)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    same_state(model, other)


def test_a_step_leaves_what_eager_leaves() -> None:
    model, other, run = pair(Net())
    for size in (4, 4, 6, 9):
        x = torch.randn(size, 8)
        both(model, other, run, lambda f, x=x: _backward(f(x)))
    assert "disc" in graphs.served().values()


def _backward(out: torch.Tensor) -> torch.Tensor:
    out.square().mean().backward()
    return out.detach()


def test_gradients_accumulate_and_flow_into_inputs() -> None:
    model, other, run = pair(Net())
    inputs = [torch.randn(4, 8) for _ in range(3)]

    def step(f: Any) -> list[torch.Tensor | None]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        for leaf in leaves:
            (f(leaf).sum() / 3).backward()
        return [leaf.grad for leaf in leaves]

    both(model, other, run, step)


def test_training_evaluation_and_no_grad_take_turns() -> None:
    model, other, run = pair(Net())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, other)]
    x = torch.randn(6, 8)
    for _ in range(3):
        for m in (model, other):
            m.train()
        both(model, other, run, lambda f: _backward(f(x)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for m in (model, other):
            m.eval()
        with torch.no_grad():
            both(model, other, run, lambda f: f(x))
        with torch.inference_mode():
            both(model, other, run, lambda f: f(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part(x).unflatten(-1, (4, 6)).transpose(1, 2) for part in self.parts]
        y = functional.scaled_dot_product_attention(*parts)
        return y.transpose(1, 2).flatten(2).tanh()


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_forward_saves_is_not_copied(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of queries and keys are permuted; their gradient takes them as they lie."""
    given: list[torch.Tensor] = []
    before = FxClusterModule._given

    def noted(self: FxClusterModule, args: Any) -> list[torch.Tensor]:
        given.extend(tensors := before(self, args))
        return tensors

    monkeypatch.setattr(FxClusterModule, "_given", noted)
    model, other = Heads(), Heads()
    other.load_state_dict(model.state_dict())
    run = torch.compile(model, backend=blade.dynamo.aot_disc, dynamic=dynamic)
    for x in (torch.randn(2, 5, 24), torch.randn(3, 7, 24)):
        both(model, other, run, lambda f, x=x: f(x).square().sum().backward())
    heads = [t for t in given if t.dim() == 4]
    assert len(heads) >= 8  # of each step: queries, keys, values, results
    assert all(t.is_contiguous() for t in heads)


def test_autocast() -> None:
    model, other, run = pair(Net())
    x = torch.randn(4, 8)

    def step(f: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = f(x)
        out.float().square().mean().backward()
        return out.detach()

    torch.manual_seed(5)
    got = step(run)
    torch.manual_seed(5)
    want = step(other)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("outside", [False, True])
def test_gradient_checkpointing(outside: bool) -> None:
    class Inner(nn.Module):
        """Without batch norm: eager counts a batch again when it recomputes, no compiler does."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(functional.gelu(self.norm(self.lin(x))), 0.2) * x

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).relu()  # type: ignore[no-any-return]

    model, other, run = pair(Inner() if outside else Checkpointed())
    x = torch.randn(4, 8)

    def step(f: Any) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return _backward(checkpoint(f, leaf, use_reentrant=False) if outside else f(leaf))

    both(model, other, run, step)


def test_what_is_written_in_place_is_differentiated() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            y = self.lin(x)
            y.mul_(2).add_(1)
            y[:, 0] = 0
            return y.relu_() + self.count

    model, other, run = pair(InPlace())
    x = torch.randn(4, 8)
    for _ in range(3):
        both(model, other, run, lambda f: _backward(f(x)))
    assert model.count == 3


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm": lambda x, w: functional.layer_norm(x @ w, (4,)).tanh(),
    "softmax": lambda x, w: (x @ w).softmax(-1) * x[:, :4],
    "gelu": lambda x, w: functional.gelu(x @ w, approximate="tanh") + functional.silu(x @ w),
    "attention": lambda x, w: functional.scaled_dot_product_attention(
        *((x @ w).view(1, 1, -1, 4) for _ in range(3)), is_causal=True
    ),
    "conv": lambda x, w: functional.conv1d(x.view(1, 6, 6), (w * 2).view(4, 6, 1)).relu() * 2,
    "index": lambda x, w: (x @ w)[torch.tensor([0, 2, 2, 1])].cumsum(0) * 2,
    "reductions": lambda x, w: (x @ w).var(1) + (x @ w).logsumexp(0).sum() + (x @ w).amax(),
    "embedding": lambda x, w: functional.embedding(torch.tensor([1, 0, 1]), x @ w).sin() * 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_in_fp64(name: str) -> None:
    run = torch.compile(
        FUNCTIONS[name], backend=blade.dynamo.aot_disc, options={"min_cluster_size": 1}
    )
    x, w = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    torch.autograd.gradcheck(run, (x.requires_grad_(), w.requires_grad_()), fast_mode=True)
    assert "disc" in graphs.served().values()


def test_a_backward_that_nobody_can_convert_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.backends.disc.backend import DiscBackend

    def convert(self: object, cluster: object, config: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(DiscBackend, "convert", convert)
    model, other, run = pair(Net())
    x = torch.randn(4, 8)
    both(model, other, run, lambda f: _backward(f(x)))
    assert "disc" not in graphs.served().values()
    assert any("no" in r.detail for one in graphs.reports() for r in one.all_reasons())


def test_an_engine_that_answers_wrong_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.backends.disc.backend import DiscBackend

    real = DiscBackend.convert

    def convert(self: DiscBackend, cluster: Any, config: Any) -> torch.ScriptObject:
        for node in cluster.gm.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sigmoid.default
        return real(self, cluster, config)

    monkeypatch.setattr(DiscBackend, "convert", convert)
    model, other, run = pair(Net())
    x = torch.randn(4, 8)
    both(model, other, run, lambda f: _backward(f(x)))
    codes = [r.code for one in graphs.reports() for r in one.all_reasons()]
    assert blade.Code.WRONG_VALUES in codes


def test_an_engine_that_fails_later_loses_nothing() -> None:
    model, other, run = pair(Net())
    x = torch.randn(4, 8)
    both(model, other, run, lambda f: _backward(f(x)))
    for graph in graphs.made():
        for part in graph.parts:
            if part.served is not None:
                part.served.engine().set_enabled(False)
    both(model, other, run, lambda f: _backward(f(x)))
    assert any(counts.get("disabled") for counts in graphs.stats().values())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_average_their_gradients(tmp_path: Path) -> None:
    assert train_together(tmp_path, "cpu") == ["disc", "disc"]


def test_nothing_is_verified_twice_and_threads_may_share() -> None:
    import threading

    model = Net().eval()
    run = torch.compile(model, backend=blade.dynamo.disc, dynamic=True)
    with torch.no_grad():
        run(torch.randn(4, 8))
    want = {n: model(torch.ones(n, 8)) for n in range(2, 8)}
    wrong: list[int] = []

    def call(n: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(run(torch.ones(n, 8)), want[n], atol=1e-4):
                    wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    [counts] = graphs.stats().values()
    assert counts["engine_runs"] >= 120


def test_nullcontext_is_harmless() -> None:
    """The context managers of a loop (autocast off) change nothing."""
    model, other, run = pair(Net())
    x = torch.randn(4, 8)
    with nullcontext(), torch.autocast("cpu", enabled=False):
        both(model, other, run, lambda f: _backward(f(x)))

# SPDX-License-Identifier: Apache-2.0
"""Trials run the model hundreds of times; the user's tensors are those of one eager call per call of the user.

A trial that raises leaves the original in place, with a ``Reason``.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.core.reason import Code
from blade.dynamo import compete
from blade.report import ORIGINAL
from blade.timing import interleaved

pytestmark = pytest.mark.needs("runtime")
BACKENDS = ("disc", "aot_disc")
STEPS = 4  # of a static cache


class StaticCache(nn.Module):
    """One step of decoding: the cache has room for ``STEPS`` calls, and no more."""

    position: torch.Tensor
    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("keys", torch.zeros(2, STEPS, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.linear(x).tanh().unsqueeze(1)
        self.keys.index_copy_(1, self.position[None], key)
        self.position.add_(1)
        return (self.keys * x.unsqueeze(1)).softmax(-1).sum(1) + self.position


class Counter(nn.Module):
    count: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.linear(x).tanh().softmax(-1)
        self.total = self.total * 0.5 + y.sum(0)
        return y * self.count + self.total


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).relu()  # type: ignore[no-any-return]


class Overflowing(nn.Module):
    """Writes to its argument; ``STEPS`` calls on the same one are the most that it survives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh().softmax(-1)
        table = torch.arange(float(STEPS), device=x.device)
        y = y + table.index_select(0, position[None])
        position.add_(1)
        return y


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of calls that were timed, so that no test passes because nothing was tried."""
    calls = [0]
    real = interleaved._Side._time

    def counted(side: Any, repeats: int) -> float:
        calls[0] += repeats
        return real(side, repeats)

    monkeypatch.setattr(interleaved._Side, "_time", counted)
    yield calls


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def pair(kind: Callable[[], nn.Module], training: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind().train(training)
    return model, copy.deepcopy(model)


def compiled(model: Any, backend: str, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"min_cluster_size": 1, **options})


def codes() -> set[Code]:
    return {r.code for one in graphs.reports() for r in one.all_reasons()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [StaticCache, Counter])
def test_buffers_of_a_compiled_model(
    kind: Callable[[], nn.Module], backend: str, trials: list[int]
) -> None:
    mine, eager = pair(kind)
    run = compiled(mine, backend)
    with torch.no_grad():
        for seed in range(STEPS):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(run(x), eager(x))
            torch.testing.assert_close(state_of(mine), state_of(eager))
        if kind is StaticCache:
            for full in (run, eager):
                with pytest.raises(IndexError, match="out of bounds"):
                    full(torch.ones(2, 8))
    assert trials[0] > 3 * STEPS and graphs.served()
    assert Code.ENGINE_RAISED not in codes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_a_batch_norm(backend: str, trials: list[int]) -> None:
    mine, eager = pair(Normalized, training=True)
    run = compiled(mine, backend)
    for seed in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        for one, model in ((run, mine), (eager, eager)):
            model.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(state_of(mine), state_of(eager))
        grads = [[p.grad for p in model.parameters()] for model in (mine, eager)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert mine.get_buffer("norm.num_batches_tracked") == 3
    with torch.no_grad():
        torch.testing.assert_close(run(x), eager(x))
    torch.testing.assert_close(state_of(mine), state_of(eager))
    assert trials[0] > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_of_a_compiled_model(backend: str, trials: list[int]) -> None:
    mine, eager = pair(Overflowing)
    run = compiled(mine, backend)
    positions = [torch.zeros((), dtype=torch.long) for _ in range(2)]
    x = torch.randn(2, 8)
    with torch.no_grad():
        for step in range(STEPS):
            torch.testing.assert_close(run(x, positions[0]), eager(x, positions[1]))
            assert positions[0] == positions[1] == step + 1
    assert trials[0] > 3 * STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_generate_with_a_static_cache(backend: str, trials: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=101,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.randint(0, 101, (2, 5))

    def tokens() -> torch.Tensor:
        return model.generate(  # type: ignore[no-any-return]
            prompt,
            max_new_tokens=8,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            pad_token_id=0,
        )

    want = tokens()
    model.forward = compiled(model.forward, backend)
    assert torch.equal(tokens(), want)
    assert torch.equal(tokens(), want)
    assert trials[0] > 8 and Code.ENGINE_RAISED not in codes()


@pytest.mark.parametrize("kind", [StaticCache, Counter])
@pytest.mark.parametrize("scripted", [False, True])
def test_buffers_of_an_optimized_model(
    kind: Callable[[], nn.Module], scripted: bool, trials: list[int]
) -> None:
    mine, eager = pair(kind)
    given = torch.jit.script(mine) if scripted else mine
    x = torch.randn(2, 8)
    optimized = blade.optimize(given, (x,), blade.Config(min_cluster_size=1, cache=False))
    report = blade.report(optimized)
    torch.testing.assert_close(state_of(given), state_of(eager))
    assert trials[0] > 3 * STEPS
    assert Code.ENGINE_RAISED not in {r.code for r in report.all_reasons()}
    names = list(state_of(eager))
    with torch.no_grad():
        for seed in range(STEPS):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(optimized(x), eager(x))
            found = state_of(optimized)
            torch.testing.assert_close({name: found[name] for name in names}, state_of(eager))


def test_arguments_of_an_optimized_model(trials: list[int]) -> None:
    mine, eager = pair(Overflowing)
    x, position = torch.randn(2, 8), torch.zeros((), dtype=torch.long)
    optimized = blade.optimize(
        mine, (x, position), blade.Config(min_cluster_size=1, cache=False, allow_tracing=True)
    )
    assert position == 0 and trials[0] > 3 * STEPS
    assert Code.ENGINE_RAISED not in {r.code for r in blade.report(optimized).all_reasons()}
    positions = [torch.zeros((), dtype=torch.long) for _ in range(2)]
    with torch.no_grad():
        for step in range(STEPS):
            torch.testing.assert_close(optimized(x, positions[0]), eager(x, positions[1]))
            assert positions[0] == positions[1] == step + 1


@produces(Code.ENGINE_RAISED)
@pytest.mark.parametrize("where", ["measure_all", "verify", "RngReplay"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trial_that_raises_leaves_the_original(
    backend: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("the trial is at fault")

    monkeypatch.setattr(compete, where, raises)
    mine, eager = pair(Counter)
    run = compiled(mine, backend, strict=False)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 8)
            assert torch.equal(run(x), eager(x))
            torch.testing.assert_close(state_of(mine), state_of(eager))
    assert set(graphs.served().values()) == {ORIGINAL}
    against = [r for one in graphs.reports() for r in one.all_reasons()]
    raised = [r.detail for r in against if r.code is Code.ENGINE_RAISED]
    assert any("the trial is at fault" in detail for detail in raised), against


def test_a_measurement_that_raises_leaves_no_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``blade.optimize``: the captured module, which serves then, is as it was."""
    from blade.selection.plan import assemble

    def raises(modules: Any, original: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        for module, own in zip(modules, inputs[1:], strict=True):
            module(*own)
            original(*own)
        raise IndexError("the trial is at fault")

    monkeypatch.setattr(assemble, "measure_all", raises)
    mine, eager = pair(Counter)
    x = torch.randn(2, 8)
    config = blade.Config(min_cluster_size=1, cache=False, strict=False)
    optimized = blade.optimize(mine, (x,), config)
    assert any("at fault" in r.detail for r in blade.report(optimized).all_reasons())
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), eager(x))
    assert optimized.count == eager.count == 1

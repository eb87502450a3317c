# SPDX-License-Identifier: Apache-2.0
"""Training by CUDA graphs: what forward saves lies where backward reads it, whatever order they run in."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_models import DEVICE
from torch import nn

import blade
from blade.dynamo.live_graphs import stats

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]

WIDTH, ROWS, LAYERS, STEPS = 256, 64, 8, 12
Order = Callable[[nn.Module, Callable[..., torch.Tensor], list[torch.Tensor]], None]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()  # graphs of other tests
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def model() -> nn.Module:
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*layers).to(DEVICE)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(count)]


def one_by_one(net: nn.Module, run: Callable[..., torch.Tensor], xs: list[torch.Tensor]) -> None:
    for x in xs:
        run(x).square().mean().backward()


def together(net: nn.Module, run: Callable[..., torch.Tensor], xs: list[torch.Tensor]) -> None:
    """All forwards before the first backward."""
    losses = [run(x).square().mean() for x in xs]
    torch.stack(losses).sum().backward()


def first_comes_last(
    net: nn.Module, run: Callable[..., torch.Tensor], xs: list[torch.Tensor]
) -> None:
    losses = [run(x).square().mean() for x in xs]
    for loss in losses:
        loss.backward()


def twice(net: nn.Module, run: Callable[..., torch.Tensor], xs: list[torch.Tensor]) -> None:
    """Backward again through what was retained, after another forward."""
    losses = [run(x).square().mean() for x in xs]
    losses[0].backward(retain_graph=True)
    run(xs[0]).square().mean().backward()
    losses[0].backward()
    losses[1].backward()


@pytest.mark.parametrize("order", [one_by_one, together, first_comes_last, twice])
@pytest.mark.parametrize("count", [2, 6])
def test_gradients_are_eagers(order: Order, count: int) -> None:
    net = model()
    eager = copy.deepcopy(net)
    run = torch.compile(net, backend=blade.dynamo.aot_disc, options={"timing": False})
    for _ in range(STEPS):
        xs = batches(count)
        for one, forward in ((net, run), (eager, eager)):
            one.zero_grad()
            order(one, forward, xs)
        for p, q in zip(net.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=1e-5)
    counts = stats()
    said = "\n".join(f"{name}: {dict(c)}" for name, c in counts.items())
    assert not any(c["graph_failures"] or c["fallbacks"] for c in counts.values()), said
    assert sum(c["graph_replays"] for c in counts.values()) > STEPS, said


def test_what_is_saved_is_not_copied() -> None:
    net = model()
    run = torch.compile(net, backend=blade.dynamo.aot_disc, options={"timing": False})

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = run(torch.randn(ROWS, WIDTH, device=DEVICE)).float().square().mean()
        net.zero_grad()
        loss.backward()

    for _ in range(4):
        step()
    before = {name: dict(c) for name, c in stats().items()}
    for _ in range(4):
        step()
    for name, now in stats().items():
        assert now["graph_replays"] == before[name]["graph_replays"] + 4, now
    copied = sum(
        c["graph_bytes_copied"] - before[n]["graph_bytes_copied"] for n, c in stats().items()
    )
    weights = sum(p.numel() for p in net.parameters())
    # the input, the result, its gradient, and gradients too small to be told apart from a launch; of all weights
    # and of what each layer saves in 16 bits nothing
    assert copied / 4 < 4 * (4 * ROWS * WIDTH + weights) + 4096, copied


def test_memory_does_not_grow() -> None:
    net = model()
    run = torch.compile(net, backend=blade.dynamo.aot_disc, options={"timing": False})
    for _ in range(6):
        one_by_one(net, run, batches(2))
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated()
    for _ in range(20):
        one_by_one(net, run, batches(2))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= used + (1 << 20)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"capturable": True}], ids=str)
def test_an_optimizers_step_is_few_launches(how: dict[str, Any]) -> None:
    net = model()
    eager = copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-3, **how) for n in (net, eager)]
    step = torch.compile(
        optimizers[0].step, backend=blade.dynamo.aot_disc, options={"timing": False}
    )
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, device=DEVICE)
        for one in (net, eager):
            one(x).square().mean().backward()
        step()
        optimizers[1].step()
        for one in (net, eager):
            one.zero_grad()
        for p, q in zip(net.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)
    counts = stats()
    assert counts and not any(c["fallbacks"] for c in counts.values()), counts


def test_a_teacher_runs_between_forward_and_backward() -> None:
    """Its graph, recorded first, may write where forward's convolutions leave their results."""

    def images(norm: bool) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
        for _ in range(6):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32) if norm else nn.SiLU()]
        return nn.Sequential(*layers).to(DEVICE)

    teacher, student = images(False).eval(), images(True)
    eager = copy.deepcopy(student)
    options = {"timing": False}
    taught = torch.compile(teacher, backend=blade.dynamo.disc, options=options)
    run = torch.compile(student, backend=blade.dynamo.aot_disc, options=options)
    xs = [torch.randn(8, 3, 48, 48, device=DEVICE) for _ in range(STEPS)]
    with torch.no_grad():
        for x in xs[:4]:  # so that its graph is there before those of the student
            taught(x)
    for x in xs:
        y = run(x)
        with torch.no_grad():
            want = taught(x)
        (y - want).square().mean().backward()
        (eager(x) - want).square().mean().backward()
        for mine, theirs in zip(student.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            largest = float(theirs.grad.abs().max())
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-2 * largest)
            mine.grad = theirs.grad = None
    counts = stats().values()
    assert not any(c["graph_failures"] or c["fallbacks"] for c in counts), stats()
    assert sum(c["graph_replays"] for c in counts) > STEPS, stats()

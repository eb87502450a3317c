# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(optimizer.step, backend="aot_disc")``: a step as one graph, in place."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import pytest
import torch
from torch import nn

import blade
from blade.backends.disc.frontend.foreach import _EACH, FOREACH

Params = Iterator[nn.Parameter]
STEPS = 50
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, lists": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd, lr a tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "sgd, lists": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 24),
        nn.LayerNorm(24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 3),
    )


def losses(
    net: nn.Module, step: Callable[[], Any], optimizer: torch.optim.Optimizer, each: Any = None
) -> list[float]:
    found = []
    for i in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        loss = (net(x) - x[:, :3]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        step()
        found.append(float(loss.detach()))
        if each is not None:
            each(optimizer, i)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_follow_eager(name: str) -> None:
    nets = [model()]
    nets.append(copy.deepcopy(nets[0]))
    one, other = (OPTIMIZERS[name](net.parameters()) for net in nets)
    addresses = [p.data_ptr() for p in nets[0].parameters()]
    step = torch.compile(one.step, backend=blade.dynamo.aot_disc)
    torch.testing.assert_close(
        losses(nets[0], step, one), losses(nets[1], other.step, other), rtol=1e-4, atol=1e-6
    )
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    assert addresses == [p.data_ptr() for p in nets[0].parameters()]
    last = graphs.made()[-1]
    assert last.report().outside == {}
    [part] = last.parts
    assert part.served is not None and part.served.serving == "disc"
    lines = part.served.engine().program().splitlines()
    assert not [line for line in lines if line.startswith("call ")]
    loops = {line.split()[1] for line in lines if line.startswith("kernel ")}
    assert len(loops) <= 7  # one for each form of parameter, of 8; one for what a step counts


def test_a_learning_rate_in_a_tensor_changes_without_a_new_graph() -> None:
    def decay(optimizer: torch.optim.Optimizer, i: int) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.97)

    nets = [model()]
    nets.append(copy.deepcopy(nets[0]))
    one, other = (torch.optim.AdamW(n.parameters(), lr=torch.tensor(0.02)) for n in nets)
    step = torch.compile(one.step, backend=blade.dynamo.aot_disc, options={"timing": False})
    got = losses(nets[0], step, one, decay)
    torch.testing.assert_close(got, losses(nets[1], other.step, other, decay), rtol=1e-4, atol=1e-6)
    assert len(graphs.made()) == 1


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("adamw", "scheduler"),
        ("adamw", "compile"),
        ("adamw, lists", "compile"),
        ("sgd, lr a tensor", "scheduler"),
    ],
)
def test_a_scheduled_learning_rate_is_compiled_twice_at_most(name: str, first: str) -> None:
    """A plain number is a constant until it changes; then Dynamo makes it an input, for good.

    Not SGD's: torch takes the ``alpha`` of ``add`` for a constant, whatever it was. Its own has to be a tensor.
    """
    nets = [model()]
    nets.append(copy.deepcopy(nets[0]))
    one, other = (OPTIMIZERS[name](net.parameters()) for net in nets)
    options = {"timing": False}
    early = torch.compile(one.step, backend=blade.dynamo.aot_disc, options=options)
    schedulers = {o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in (one, other)}
    step = early if first == "compile" else None
    step = step or torch.compile(one.step, backend=blade.dynamo.aot_disc, options=options)

    def decay(optimizer: torch.optim.Optimizer, i: int) -> None:
        schedulers[optimizer].step()

    got = losses(nets[0], step, one, decay)
    torch.testing.assert_close(got, losses(nets[1], other.step, other, decay), rtol=1e-4, atol=1e-6)
    assert 1 <= len(graphs.made()) <= 2
    assert set(graphs.served().values()) == {"disc"}


@pytest.mark.parametrize("op", FOREACH, ids=str)
def test_lists_are_what_they_are_of_each(op: torch._ops.OpOverload) -> None:
    """Against ATen's own."""
    lists = [[0.1 + 0.8 * torch.rand(2, 2) for _ in range(3)] for _ in range(3)]
    given: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            given.append(lists[len(given)])
        elif kind == "List[number]":
            given.append([0.5, 2.0, 3.0])
        elif kind == "number" and not argument.kwarg_only and not argument.has_default_value():
            given.append(2.0)
        elif kind == "Tensor":
            given.append(torch.tensor(1.5))
    for a, b in zip(FOREACH[op](*given), op(*given), strict=True):
        torch.testing.assert_close(a, b)


def test_every_decomposition_of_lists_has_its_op() -> None:
    packets = {str(op._schema.name).removeprefix("aten::_foreach_") for op in FOREACH}
    assert packets == {name.split(".")[0] for name in _EACH}

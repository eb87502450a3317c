# SPDX-License-Identifier: Apache-2.0
"""Dtypes, shapes, strides, control flow, modules and gradients of optimized modules."""

import copy
from typing import Any

import pytest
import torch
from semantics import SCRIPT, Function, assert_same, check, optimized, rand
from torch import nn

import blade
from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


SERVED = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_promotion(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + 1
        return a * 2.5, a + y.to(torch.float64), a * y.sum(), x.sum(), x == y, a / 3

    call = rand(3, 4, dtype=dtype), rand(3, 4, seed=1)
    check(Function(model), call, (rand(2, 5, dtype=dtype), rand(2, 5)), served=dtype in SERVED)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (1, 1), (2, 3, 1, 5)])
def test_zero_dimensional_and_empty_tensors(shape: tuple[int, ...]) -> None:
    def model(x: torch.Tensor) -> Any:
        y = torch.relu(x) * 2 + 1
        return y, y.sum(), torch.exp(-y).reshape(-1), torch.stack([y, x]).mean(0)

    check(Function(model), (rand(*shape),), served=0 not in shape)


def test_sizes_never_seen() -> None:
    def model(x: torch.Tensor) -> Any:
        return torch.softmax(x * 2, -1) + 1, x.sum(), torch.relu(x).reshape(-1)

    shapes = [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0), (17, 33), (2, 129)]
    check(Function(model), *[(rand(*s, seed=i),) for i, s in enumerate(shapes)])


def test_other_strides_and_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(6)).eval()
    x = rand(2, 3, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    odd = rand(2, 8, 8, 3, seed=3).permute(0, 3, 1, 2)
    loaded = check(model, (x,), (last,), (odd,), (x[:, :, ::2],), (x.expand(2, 3, 8, 8),))
    assert loaded(x).stride() == model(x).stride()
    assert optimized(model, last)(last).stride() == model(last).stride()
    check(Function(lambda x: torch.relu(x.t()) + 1), (rand(3, 4),), (rand(4, 6).t(),))
    check(Function(lambda x: torch.relu(x) + 1), (rand(6, 8)[::2, 1:],), (rand(1, 4).expand(3, 4),))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, limit: int) -> tuple[torch.Tensor, int]:
        if x.size(0) == 0:
            return x, -1
        n = 0
        while bool(x.abs().max() > 0.1):
            x = torch.tanh(self.step(x)) * 0.5
            if n == limit:
                break
            if bool(x.sum() > 0):
                x = x - 0.1 * n
            else:
                x = torch.sin(x) + n * 0.01
            n += 1
        return torch.relu(x) + n, n


def test_data_dependent_loops_and_branches() -> None:
    torch.manual_seed(0)
    calls: list[tuple[Any, ...]] = [
        (rand(3, 4), 5),
        (rand(2, 4, seed=1), 9),
        (rand(0, 4), 3),
        (rand(1, 4), 0),
    ]
    check(Adaptive(), *calls)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h = torch.zeros(x.size(1), 4)
        states: list[torch.Tensor] = []
        for t in range(x.size(0)):
            h = torch.tanh(self.cell(torch.cat([x[t], h], -1))) * (t + 1)
            states.append(h * 2)
        return h, states


def test_a_recurrent_loop_is_served_inside() -> None:
    torch.manual_seed(0)
    loaded = check(
        Recurrent(),
        (rand(5, 2, 4),),
        (rand(3, 6, 4, seed=1),),
        (rand(0, 2, 4),),
        (rand(9, 1, 4),),
        allow_tracing=SCRIPT,
    )
    stats = blade.stats(loaded)
    assert max(s["engine_runs"] for s in stats.values()) >= 5 + 3 + 9


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.table.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.block, nn.LayerNorm(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.block(self.table(ids))
        for layer in self.layers:
            x = layer(x) + x
        return self.out(self.block(x))


def test_tied_weights_and_shared_modules() -> None:
    torch.manual_seed(0)
    calls = [(torch.tensor([[1, 2, 3]]),), (torch.arange(10).reshape(5, 2),)]
    check(Tied(), *calls)
    check(Tied(), *calls, allow_tracing=SCRIPT)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.linear(x)) * self.calls

    @torch.jit.export
    def reset(self, value: float) -> None:
        self.calls.fill_(value)

    @torch.jit.export
    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 3


def test_other_methods_share_the_state() -> None:
    torch.manual_seed(0)
    model = Methods()
    loaded = optimized(model.eval(), rand(3, 4), preserved_attributes=["reset", "project"])
    own = copy.deepcopy(model)
    x = rand(5, 4, seed=1)
    for module in (own, loaded):
        module(x)
        module.reset(10.0)
    assert_same(loaded(x).detach(), own(x).detach())
    assert_same(loaded.project(x).detach(), own.project(x).detach())
    assert blade.stats(loaded)


def test_gradients_flow_to_the_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    loaded = optimized(model, rand(3, 4))
    grads = []
    for module in (model, loaded):
        x = rand(5, 4, seed=1).requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert_same(grads[1], grads[0])
    [stats] = blade.stats(loaded).values()
    assert stats[Code.GUARD_GRAD.value] == 1
    with torch.no_grad():
        assert_same(loaded(rand(5, 4)), model(rand(5, 4)))

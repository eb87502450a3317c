# SPDX-License-Identifier: Apache-2.0
"""What an optimized or compiled module must keep besides its values: writes, aliases, exceptions, results,
randomness."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from semantics import CHECKS, SCRIPT, Function, assert_same, check, optimized, rand
from torch import nn

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
Check = Callable[..., Any]


@pytest.fixture(params=CHECKS, name="through")
def _through(request: pytest.FixtureRequest) -> Check:
    """``check``, by each way into blade."""
    return CHECKS[request.param]


def _add_to_input(x: torch.Tensor) -> torch.Tensor:
    before = torch.sin(x) * 2
    x.add_(1)
    return before + torch.cos(x)


def _assign_slice(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:] = torch.relu(x[:, :-1]) * 2
    return torch.tanh(x)


def _assign_mask(x: torch.Tensor) -> torch.Tensor:
    x[x < 0] = 0.5
    return torch.exp(-x) + 1


def _write_then_return_input(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x) * 3
    x.copy_(y)
    return x


def _write_own(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + 1
    y[0] += torch.sin(x[0]) * 2
    y.view(-1)[1:3].mul_(4)
    return torch.cos(y)


@pytest.mark.parametrize(
    "model", [_add_to_input, _assign_slice, _assign_mask, _write_then_return_input, _write_own]
)
def test_writes(model: Callable[..., Any], through: Check) -> None:
    through(Function(model), (rand(3, 4),), (rand(5, 7, seed=1),), (rand(1, 3, seed=2),))


class Cache(nn.Module):
    """One step of decoding: the cache is the caller's and is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        key = torch.tanh(self.project(x))
        cache[:, 2:4].add_(key.unsqueeze(1))
        cache.index_copy_(1, at, key.unsqueeze(1) * 2)
        scores = torch.softmax((cache * x.unsqueeze(1)).sum(-1), -1)
        return (scores.unsqueeze(-1) * cache).sum(1) + key


def test_a_cache_of_the_caller_is_written_in_place(through: Check) -> None:
    calls = [(rand(b, 8), rand(b, 6, 8, seed=1), torch.tensor([5])) for b in (2, 3, 1)]
    through(Cache(), *calls)


class Running(nn.Module):
    """Keeps state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x)) * 2
        self.mean.mul_(0.9).add_(y.mean(0) * 0.1)
        self.calls += 1
        return (y - self.mean) / self.calls


def test_buffers_updated_by_forward_over_several_calls(through: Check) -> None:
    model = Running()
    loaded = through(model, *[(rand(n, 4, seed=n),) for n in (3, 5, 1, 7, 3)])
    assert int(loaded.calls) == 5
    assert int(model.calls) == 0


def _view_of_input(x: torch.Tensor) -> Any:
    return x.reshape(-1), torch.relu(x) + 1


def _input_itself(x: torch.Tensor) -> Any:
    return x, torch.relu(x) + 1


def _views_of_each_other(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y, y.t(), y[0], torch.sin(y)


def _same_twice(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y, y


def _nothing_shared(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y.t(), x + 1, (y * 1).view(-1)


def _maybe_the_input(x: torch.Tensor) -> Any:
    return x.contiguous(), x.to(torch.float32), torch.relu(x) * 2


@pytest.mark.parametrize(
    "model",
    [
        _view_of_input,
        _input_itself,
        _views_of_each_other,
        _same_twice,
        _nothing_shared,
        _maybe_the_input,
    ],
)
def test_aliases(model: Callable[..., Any], through: Check) -> None:
    through(Function(model), (rand(3, 4),), (rand(5, 2, seed=1),))


def _simplified_to_the_input(x: torch.Tensor) -> Any:
    return x * 1, x.clone(), torch.cat([x]), x.neg().neg()


def _simplified_to_one(x: torch.Tensor) -> Any:
    return (
        torch.relu(x) + 1,
        torch.relu(x) + 1,
        (torch.relu(x) + 1).clone(),
        (x[:1] * 2).expand(3, 4),
    )


@pytest.mark.parametrize("model", [_simplified_to_the_input, _simplified_to_one])
def test_results_that_are_simplified_away_are_still_fresh(
    model: Callable[..., Any], through: Check
) -> None:
    loaded = through(Function(model), (rand(3, 4),))
    x = rand(3, 4)
    before = x.clone()
    for result in loaded(x):
        if result.is_contiguous():
            result.zero_()
    assert torch.equal(x, before)
    assert_same(loaded(x), model(x))


class Checked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        if x.size(0) > 6:
            raise ValueError("too many rows")
        assert bool(y.sum() < 1000), "too large"
        x.mul_(2)
        return torch.sigmoid(y) + 1


def test_what_raises_still_raises_before_later_writes() -> None:
    calls = [(rand(3, 4),), (rand(7, 4),), (torch.full((2, 4), 900.0),), (rand(5, 4),)]
    loaded = check(Checked(), *calls)
    with pytest.raises(torch.jit.Error, match="ValueError: too many rows"):
        loaded(rand(7, 4))
    with pytest.raises(torch.jit.Error, match="AssertionError: too large"):
        loaded(torch.full((2, 4), 900.0))


def test_a_shape_error_stays_an_error() -> None:
    loaded = optimized(Function(lambda x, y: torch.relu(x) @ y + 1), (rand(3, 4), rand(4, 5)))
    with pytest.raises(RuntimeError):
        loaded(rand(3, 4), rand(3, 5))


class Returns(nn.Module):
    def forward(
        self, x: torch.Tensor
    ) -> tuple[
        int, float, bool, None, str, dict[str, list[torch.Tensor]], tuple[torch.Tensor, int]
    ]:
        y = torch.relu(x) + 1
        kept = [y, y * 2]
        kept.append(torch.sin(y))
        total = y.sum()
        return (
            x.size(0) * 2,
            float(total),
            bool(total > 0),
            None,
            "text",
            {"kept": kept, "other": [torch.cos(x)]},
            (torch.tanh(y), int(total)),
        )


def test_numbers_lists_dicts_and_none(through: Check) -> None:
    through(Returns(), (rand(3, 4),), (rand(5, 2, seed=1),))


class Optional_(nn.Module):
    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 2.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = torch.relu(x) * scale
        if bias is None:
            return y + 1, bias
        return torch.sin(y) + bias, bias * 2


def test_optional_inputs_and_defaults() -> None:
    model = Optional_()
    calls = [(rand(3, 4), rand(4)), (rand(2, 4), None), (rand(5, 4), rand(4), -1.5)]
    check(model, *calls, allow_tracing=SCRIPT)
    check(model, (rand(3, 4),), (rand(2, 4), rand(4)), allow_tracing=SCRIPT)


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.nn.functional.dropout(torch.relu(x) * 2, 0.5, True)
        b = torch.rand_like(x) + torch.sigmoid(a)
        c = torch.bernoulli(torch.sigmoid(b)) * torch.normal(b, 1.0)
        return c, torch.randn(x.size(0)) + c.sum(-1)


def test_random_ops_draw_the_same_numbers(through: Check) -> None:
    through(Random(), (rand(3, 4),), (rand(5, 7, seed=1),))

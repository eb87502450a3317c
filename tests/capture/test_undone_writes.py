# SPDX-License-Identifier: Apache-2.0
"""A call that no path answers finds its arguments as they were, and so does the path or the original that does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture
from blade.config import Config

DRAW = torch.Generator().manual_seed(0)


def wholly(x: torch.Tensor, cache: torch.Tensor) -> None:
    cache.add_(x).mul_(2)


def in_part(x: torch.Tensor, cache: torch.Tensor) -> None:
    cache[1:, 2] = x[1:, 2]
    cache[:, 0].zero_()


def by_index(x: torch.Tensor, cache: torch.Tensor) -> None:
    cache[torch.tensor([2, 0])] = x[:2]
    cache.index_add_(0, torch.tensor([0, 0]), x[1:])


def overlapping(x: torch.Tensor, cache: torch.Tensor) -> None:
    cache.neg_()
    cache[0].add_(1)
    cache.mul_(x)


def in_a_list(x: torch.Tensor, cache: torch.Tensor) -> None:
    torch._foreach_add_([cache[0], cache[2]], [x[0], x[1]])


def by_a_script(x: torch.Tensor, cache: torch.Tensor) -> None:
    scripted_write(x, cache)


@torch.jit.script
def scripted_write(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    for row in range(cache.size(0)):
        if row != 1:
            cache[row] += x[row]
    return cache


WAYS = [wholly, in_part, by_index, overlapping, in_a_list, by_a_script]


class Writes(nn.Module):
    """Writes, decides, writes again and decides again; no script understands it."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ways = {True: torch.relu, False: torch.tanh}
        self.write(x, cache)
        y = ways[bool(cache.sum() > 0)](x)
        self.write(y, cache)
        return y * (2 if bool(cache[0, 0] > x[0, 0]) else -1) + cache


class InATuple(Writes):
    def forward(self, x: torch.Tensor, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, both[0]) + super().forward(x, both[1])


def calls(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn(3, 4, generator=DRAW), torch.randn(3, 4, generator=DRAW)) for _ in range(count)
    ]


def copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map(torch.clone, value)


def assert_right(module: Callable[..., Any], model: nn.Module, given: Any, may_raise: bool) -> bool:
    """Whether ``module`` answers like ``model``, and leaves the same; else it raises and leaves ``given``."""
    own, want = copied(given), copied(given)
    answer = model(*want)
    try:
        got = module(*own)
    except (RuntimeError, torch.jit.Error) as error:
        assert may_raise and "No captured path" in str(error)
        torch.testing.assert_close(own, given, rtol=0, atol=0)
        return False
    torch.testing.assert_close((got, own), (answer, want))
    return True


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("paths", [1, 2, 8])
def test_what_was_written_is_undone(write: Any, paths: int) -> None:
    model = Writes(write).eval()
    sample, *further = calls(25)
    captured = capture(model, sample, Config(allow_tracing=True, max_paths=paths))
    assert captured.how == "trace" and not captured.limits
    answered = [assert_right(captured.module, model, one, may_raise=True) for one in further]
    assert any(answered) and (paths == 1) <= (not all(answered))
    assert assert_right(captured.module, model, sample, may_raise=False)


@pytest.mark.parametrize("paths", [1, 8])
def test_what_a_tuple_holds_is_left_alone(paths: int) -> None:
    model = InATuple(in_part).eval()
    given = [(x, (cache, x + cache)) for x, cache in calls(25)]
    captured = capture(model, given[0], Config(allow_tracing=True, max_paths=paths))
    for one in given:
        assert_right(captured.module, model, one, may_raise=one is not given[0])


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("write", [wholly, in_part, by_a_script])
def test_the_original_begins_anew(write: Any) -> None:
    model = Writes(write).eval()
    sample, *further = calls(25)
    config = Config(allow_tracing=True, max_paths=1, timing=False, min_cluster_size=1)
    fast = blade.optimize(model, sample, config)
    for one in [sample, *further]:
        assert_right(fast, model, one, may_raise=False)
    assert blade.stats(fast)["original"]["calls"] > 0


def test_one_tensor_that_is_given_twice_is_restored() -> None:
    model = Writes(in_part).eval()
    x = torch.randn(3, 4, generator=DRAW)
    captured = capture(model, (x, x.clone()), Config(allow_tracing=True, max_paths=1))
    for given in [calls(1)[0][0] for _ in range(20)]:
        own, want = given.clone(), given.clone()
        answer = model(want, want)
        try:
            got = captured.module(own, own)
        except torch.jit.Error:
            torch.testing.assert_close(own, given, rtol=0, atol=0)
        else:
            torch.testing.assert_close((got, own), (answer, want))


def test_writes_behind_the_last_check_cost_nothing() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            y = {True: torch.relu, False: torch.tanh}[bool(x.sum() > 0)](x)
            cache[0] = y[0]
            return y + cache

    captured = capture(Late().eval(), calls(1)[0], Config(allow_tracing=True, max_paths=1))
    kinds = [node.kind() for node in captured.module.graph.nodes()]
    assert "aten::clone" not in kinds and "aten::copy_" in kinds

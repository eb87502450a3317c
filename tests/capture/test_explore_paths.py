# SPDX-License-Identifier: Apache-2.0
"""Paths for sizes that no sample has: which are found, and when the search for them ends."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.core.reason import Code
from blade.errors import BladeWarning
from blade.runtime.originals import number_of
from blade.timing.time_budget import TimeBudget


class Down(nn.Module):
    """Halves a side and doubles it again, as UNets do; an odd side needs its size in the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.step = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = vars(self)["step"]  # no script
        size = x.shape[-2:] if x.shape[-1] % step != 0 or x.shape[-2] % step != 0 else None
        y = self.norm(self.down(x))
        if size is None:
            y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        else:
            y = F.interpolate(y, size=size, mode="nearest")
        return self.norm(y + x).chunk(2, 1)[0]


def test_a_path_parts_before_what_the_others_assume() -> None:
    model = Down().eval()
    captured = capture(model, torch.rand(2, 4, 8, 8), Config())
    assert captured.how == "trace" and len(captured.paths) > 1
    for height, width in ((8, 6), (6, 7), (10, 15)):
        x = torch.rand(3, 4, height, width)
        torch.testing.assert_close(captured.module(x), model(x))


def test_the_number_of_chunks_is_a_condition_on_sizes() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value, *gates = self.linear(x).chunk(2, -1)
            parts = x.chunk(3, 0)
            return value * gates[0] + len(parts)

    model = Gated().eval()
    captured = capture(model, torch.rand(6, 8), Config())
    conditions = [text for path in captured.paths for text in path.conditions]
    assert any("x.size(0)" in text for text in conditions)
    assert not any("gave" in text for text in conditions)  # no check of elements is left
    for rows in (3, 5, 6, 11):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(captured.module(x), model(x))


def test_half_of_the_budget_is_for_sizes_that_no_sample_has() -> None:
    ticks = iter([0.0, *[16.0] * 100])
    budget = TimeBudget(30.0, clock=lambda: next(ticks))
    captured = capture(Down().eval(), torch.rand(2, 4, 8, 8), Config(), None, budget)
    assert len(captured.paths) == 1
    [late] = [one for one in captured.reasons if one.code is Code.TIME_BUDGET]
    assert "a sample that takes it is traced in any case" in late.detail

    ticks = iter([0.0, *[16.0] * 100])
    budget = TimeBudget(30.0, clock=lambda: next(ticks))
    samples = [torch.rand(2, 4, 8, 8), torch.rand(2, 4, 8, 7)]
    assert len(capture(Down().eval(), samples, Config(), None, budget).paths) == 2


class Repeats(nn.Module):
    """Returns what it also looks at through views, as caches are; the rows decide between two paths."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grown = torch.cat([x, x * 2], 1)
        key = grown[:, None].expand(-1, 3, -1).reshape(-1, grown.shape[1])
        other = grown.relu() if x.shape[0] > vars(self)["rows"] else grown.tanh()  # no script
        return key.sum(0), grown, other + key.mean()


def test_views_of_what_a_path_returns_stay_in_its_engine() -> None:
    model = Repeats().eval()
    model.rows = 4
    config = Config(optimization_pipeline="disc", timing=False, min_cluster_size=1)
    samples = [torch.rand(3, 8), torch.rand(6, 8)]
    optimized = blade.optimize(model, samples, config)
    report = blade.report(optimized)
    assert len(report.paths) == 2 and len(report.clusters) == 2
    assert not [one for one in report.reasons if one.code is Code.ALIASES]
    for rows in (2, 9):
        x = torch.rand(rows, 8)
        for found, expected in zip(optimized(x), model(x)):
            torch.testing.assert_close(found, expected)
    assert blade.stats(optimized)["path 1"]["calls"] == blade.stats(optimized)["path 2"]["calls"]


class Shared(nn.Module):
    """Returns a tensor and a view of it, on both paths: the caller may write to one and read the other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp() if x.shape[0] > vars(self)["rows"] else x.cos()
        return y, y[:, 1:]


def test_views_that_a_caller_receives_stay_views_on_every_path() -> None:
    model = Shared().eval()
    model.rows = 4
    config = Config(optimization_pipeline="disc", timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, [torch.rand(3, 8), torch.rand(6, 8)], config)
    for rows in (2, 9):
        whole, part = optimized(torch.rand(rows, 8))
        part.fill_(7.0)
        assert bool((whole[:, 1:] == 7.0).all())


class Experts(nn.Module):
    """Tokens sorted by expert, as a mixture of experts does it in transformers; the batch decides on a path."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6))
        self.step = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])[None]
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        flat = (x + places[..., None] * vars(self)["step"]).flatten(0, 1)  # no script
        weights, experts = self.gate(flat).softmax(-1).topk(1)
        weights /= weights.sum(-1, keepdim=True) + 1
        order = experts.flatten().argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        sorted_ = torch.bmm(flat[order, None], self.experts[experts.flatten()[order]])[:, 0]
        return (sorted_[back] * weights).view(x.shape)


def test_a_list_of_indices_is_no_write_to_weights() -> None:
    """A model that may write to a weight gets one path."""
    torch.manual_seed(0)
    model = Experts().eval()
    samples = [(torch.randn(1, 5, 6),), (torch.randn(3, 4, 6),)]
    captured = capture(model, samples, Config())
    assert len(captured.paths) == 2 and len(captured.samples) == 2
    for batch in (1, 2, 5):
        x = torch.randn(batch, 7, 6)
        torch.testing.assert_close(captured.module(x), model(x))


def test_samples_that_no_path_answers_are_the_originals() -> None:
    torch.manual_seed(0)
    model = Experts().eval()
    samples = [(torch.randn(1, 5, 6),), (torch.randn(3, 4, 6),)]
    with pytest.warns(BladeWarning, match="There the original model answers"):
        fast = blade.optimize(model, samples, Config(max_paths=1))
    for (x,) in samples:
        torch.testing.assert_close(fast(x), model(x))


class Ranked(nn.Module):
    """Elements in NumPy, after a normalization that a graph folds into the weights, and so rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        nn.init.normal_(self.norm.bias)
        self.norm.running_var.uniform_(1, 2)  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).mean((2, 3))
        return y * torch.from_numpy(np.sqrt(np.abs(y.detach().numpy())))


@pytest.mark.needs("runtime")
def test_where_no_path_answers_a_sample_the_original_is_asked_at_once() -> None:
    torch.manual_seed(0)
    model, x = Ranked().eval(), torch.randn(2, 3, 16, 16)
    with pytest.warns(BladeWarning, match="There the original model answers"):
        fast = blade.optimize(model, x)
    for given in (x, torch.randn(1, 3, 9, 9)):
        assert torch.equal(fast(given), model(given))
    assert blade.stats(fast)["original"]["calls"] == 2
    assert torch.ops.blade.has_original_changed(number_of(fast.graph))
    with pytest.warns(BladeWarning, match="There the original model answers"):
        some = blade.optimize(Experts().eval(), torch.randn(1, 5, 6), Config(max_paths=1))
    assert not torch.ops.blade.has_original_changed(number_of(some.graph))


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == vars(self)["rows"]:  # no script
            return self.few(x).relu() * 2
        return self.many(self.many(self.many(x).tanh()).sigmoid()).exp()


@pytest.mark.needs("runtime", "torch_mlir")
def test_what_the_first_sample_reaches_is_converted_first() -> None:
    model = Forks().eval()
    model.rows = 4
    config = Config(optimization_pipeline="disc", min_cluster_size=1, time_budget=1e-6)
    report = blade.report(blade.optimize(model, [torch.rand(4, 8), torch.rand(7, 8)], config))
    late = {r.subject for c in report.clusters for r in c.reasons if r.code is Code.TIME_BUDGET}
    other = {c.name for c in report.clusters if "aten::exp" in c.ops}
    assert len(report.clusters) == 2 and late == other

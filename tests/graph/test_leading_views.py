# SPDX-License-Identifier: Apache-2.0
"""Views of a cluster's input that leave the cluster: an engine would decline each call with a transposed input."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.listing import kind_of
from blade.graph.torchscript.view import view


class Parted(nn.Module):
    """``inner`` has a tensor of an earlier cluster, of [*, 8, 16], and what it returns is read behind a decision."""

    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.transposed = transposed

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        s = self.conv(x).transpose(1, 2)
        s = s if self.transposed else s.contiguous()
        if float(s.sum()) > 1e9:
            return s, w
        y, left = self.inner(s, w)
        if float(y.sum()) > 1e9:
            return y, w
        return y, (left * 2).exp()

    def inner(self, s: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        a, b = s.split(8, dim=2)
        return torch.matmul(a.exp(), w), b


class Chained(Parted):
    def inner(self, s: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        a = s[:, :, :8]
        return torch.matmul(a.exp(), w), a.unsqueeze(1)


class OfItsOwn(Parted):
    """The view is of what the cluster makes."""

    def inner(self, s: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        a, b = s.exp().split(8, dim=2)
        return torch.matmul(a, w), b


class Copied(Parted):
    def inner(self, s: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        own = s.contiguous()
        return torch.matmul(own[:, :, :8], w), own


def sample(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, 8, generator=draw), torch.randn(rows, 8, 5, generator=draw)


def clusters(model: nn.Module, least: int = 1) -> list[set[str]]:
    seen = view(capture(model.eval(), sample(), Config(allow_tracing=True, max_paths=1)))
    labels = [
        frozenset[str]() if k in seen.excluded else frozenset({"any"})
        for k in range(len(seen.nodes))
    ]
    found = cluster_blocks(seen, labels, min_size=least)
    kinds = [{kind_of(seen.nodes[n]).removeprefix("aten::") for n in g.nodes} for g in found.groups]
    return [one for one in kinds if "matmul" in one]


@pytest.mark.parametrize(
    ("model", "left", "kept"),
    [
        (Parted(), "split", "exp"),
        (Chained(), "slice", "exp"),
        (Parted(transposed=False), "", "split"),
        (OfItsOwn(), "", "split"),
        (Copied(), "", "contiguous"),
    ],
    ids=["a part", "a chain", "of a contiguous tensor", "of its own tensor", "a copy"],
)
def test_views_that_leave_are_left_out(model: nn.Module, left: str, kept: str) -> None:
    [found] = clusters(model)
    assert left not in found
    assert kept in found


def test_a_cluster_that_is_too_small_without_them_is_none() -> None:
    assert clusters(Parted(), 5)
    assert not clusters(Parted(), 6)


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("model", [Parted, Chained, Copied])
def test_no_engine_declines(model: type[Parted]) -> None:
    made = model().eval()
    config = blade.Config(
        timing=False, min_cluster_size=1, optimization_pipeline="disc", allow_tracing=True
    )
    optimized = blade.optimize(made, sample(), config)
    assert not [r for r in blade.report(optimized).reasons if r.code.value == "guard_shape"]
    with torch.no_grad():
        for rows in (2, 1, 3):
            torch.testing.assert_close(
                optimized(*sample(rows)), made(*sample(rows)), atol=1e-4, rtol=1e-4
            )
    assert sum(one.get("fallbacks", 0) for one in blade.stats(optimized).values()) == 0

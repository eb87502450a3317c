# SPDX-License-Identifier: Apache-2.0
"""Clusters lay out what they return as torch did at the user's sample, whatever a shape function says."""

import pytest
import torch
from cutting import cut, trace
from torch import nn

import blade
from blade.config import Config
from blade.graph.shapes.fake_tensors import layout_at_hints
from blade.graph.shapes.memo import MemoizedResult
from blade.graph.shapes.memory_format import dense_order, in_order
from blade.graph.shapes.observed_layout import in_observed_layout


class Tokens(nn.Module):
    """Tokens as an image, convolved: how torch lays it out at batch 1 depends on a stride without meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        tokens = torch.tanh(x).permute(0, 2, 1)
        height, width = image.shape[2:]
        return torch.relu(self.conv(tokens.reshape(-1, 8, height, width)))


def tokens(batch: int, height: int = 6, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, height * width, 8), torch.randn(batch, 3, height, width)


@pytest.mark.parametrize("batch", [1, 2])
def test_results_are_laid_out_as_at_the_sample(batch: int) -> None:
    model, sample = Tokens().eval(), tokens(batch)
    with torch.no_grad():
        observed = dense_order(model(*sample))
    [extracted] = cut(trace(model, sample, tokens(3 - batch)))
    [out] = extracted.cluster.gm.graph.output_node().args[0]
    assert observed is not None
    placed = dense_order(layout_at_hints(out.meta["val"])) or ()
    assert [a for a in placed if a in observed] == list(observed)


def test_an_axis_of_size_1_at_the_sample_stays_where_it_is() -> None:
    last = torch.empty(2, 6, 5, 8).permute(0, 3, 1, 2)
    placed = in_observed_layout(MemoizedResult(last), (1, 2, 3)).value
    assert placed.shape == last.shape and placed.is_contiguous()
    assert in_observed_layout(MemoizedResult(last), (2, 3, 1)).value is last
    assert (
        in_observed_layout(MemoizedResult(last, frozenset({0})), (1, 2, 3)).value is last
    )  # another's memory


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("batch", [1, 2])
def test_images_made_of_tokens_are_served_at_every_batch(batch: int) -> None:
    model, sample = Tokens().eval(), tokens(batch)
    optimized = blade.optimize(model, sample, CONFIG)
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == "disc"
    with torch.no_grad():
        assert optimized(*sample).stride() == model(*sample).stride()
        for other in (tokens(1), tokens(3, 4, 7)):
            torch.testing.assert_close(optimized(*other), model(*other))


@pytest.mark.needs("runtime", "torch_mlir")
def test_sliced_channels_last_images_are_served() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.MaxPool2d(2)).eval()
    whole = in_order(torch.randn(2, 3, 16, 14), (0, 2, 3, 1))
    optimized = blade.optimize(model, whole[:, :, ::2], CONFIG)
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == "disc"
    for x in (whole[:, :, ::2], whole[:1, :, :, 2:]):
        with torch.no_grad():
            want, got = model(x), optimized(x)
        torch.testing.assert_close(got, want)
        assert dense_order(got) == dense_order(want)


CONFIG = Config(timing=False, optimization_pipeline="disc", cache=False)

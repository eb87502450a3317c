# SPDX-License-Identifier: Apache-2.0
"""Sizes that torch.compile writes as one sum: those of a convolution with steps."""

import graphs
import torch
from torch import nn

import blade


class Attended(nn.Module):
    """A convolved image as tokens that attend to each other, and as an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.second(self.first(x))
        batch, channels, height, width = image.shape
        tokens = self.linear(image.flatten(2).transpose(1, 2))
        tokens = torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens
        return torch.relu(tokens.transpose(1, 2).view(batch, channels, height, width)) + image


def test_a_view_to_sums_of_sizes_is_part_of_its_cluster() -> None:
    model = Attended().eval()
    compiled = torch.compile(model, backend=blade.dynamo.disc, dynamic=True)
    with torch.no_grad():
        for size in (8, 12, 21):
            x = torch.randn(2, 3, size, size + 2)
            torch.testing.assert_close(compiled(x), model(x))
    [report] = graphs.reports()
    assert not report.outside and [c.backend for c in report.clusters] == ["disc"]

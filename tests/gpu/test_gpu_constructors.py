# SPDX-License-Identifier: Apache-2.0
"""Index tables that a model makes on the CPU, and slices of its weights: both are part of its one engine."""

import pytest
import torch
from entrances import Optimized
from torch import nn

from blade.dynamo import disc
from blade.dynamo.live_graphs import live_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


class RelativePositions(nn.Module):
    """As BEiT makes them: positions of a grid on the CPU index a table on the GPU, without its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1000, 3).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, m = x.shape[1], x.shape[2]
        flat = torch.flatten(
            torch.stack(torch.meshgrid(torch.arange(n), torch.arange(m), indexing="ij")), 1
        )
        relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += n - 1
        relative[:, :, 1] += m - 1
        relative[:, :, 0] *= 2 * m - 1
        index = torch.zeros(size=(n * m + 1,) * 2, dtype=relative.dtype)
        index[1:, 1:] = relative.sum(-1)
        index[0, 0:] = (2 * n - 1) * (2 * m - 1)
        bias = self.table[1:][index.view(-1)].view(n * m + 1, n * m + 1, -1).permute(2, 0, 1)
        return x.flatten(1).sum(1).view(-1, 1, 1, 1) * bias


def test_tables_of_positions_are_part_of_the_engine() -> None:
    model = RelativePositions().cuda().eval()
    run = Optimized(model, (torch.randn(2, 4, 5).half().cuda(),))
    assert run.served() == 1, run.reasons()
    for shape in ((2, 4, 5), (1, 7, 3), (5, 2, 9)):
        x = torch.randn(*shape).half().cuda()
        torch.testing.assert_close(run(x), model(x), rtol=2e-3, atol=2e-3)


class WindowMask(nn.Module):
    """As Swin-V2 of transformers makes it: which windows a pixel may see, in floats on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-1]
        row = (torch.arange(n) >= n - 4).to(torch.int64) + (torch.arange(n) >= n - 2)
        window = (row[:, None] * 3 + row).to(torch.float32).view(-1)
        apart = window[:, None] - window
        mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        return (x.flatten(1)[:, None] * 2 + mask.to(x.device, x.dtype)).softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_of_floats_are_part_of_the_engine(dynamic: bool) -> None:
    model = WindowMask().cuda().eval()
    before = set(live_graphs())
    run = torch.compile(model, backend=disc, dynamic=dynamic)
    for shape in ((2, 8, 8), (2, 9, 9)):
        x = torch.randn(*shape, device="cuda").half()
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=2e-3, atol=2e-3)
    made = [graph.report() for graph in live_graphs() if graph not in before]
    assert made and not any(report.outside for report in made), made

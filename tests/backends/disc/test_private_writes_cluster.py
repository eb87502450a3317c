# SPDX-License-Identifier: Apache-2.0
"""Models that write parts of their own tensors are one cluster, with every op in the engine."""

import pytest
import torch

import blade

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

_QUICK = blade.Config(timing=False, optimization_pipeline="disc")


class Fourier(torch.nn.Module):
    """A layer of a Fourier operator: low frequencies are weighted, the others dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.fft.rfft(torch.relu(x))
        out = torch.zeros(x.size(0), 4, x.size(-1) // 2 + 1, dtype=torch.cfloat)
        out[:, :, :3] = torch.einsum("bix,iox->box", seen[:, :, :3], self.weight)
        return torch.fft.irfft(out, n=x.size(-1)) + x


class Masked(torch.nn.Module):
    """Shifted windows with the mask of Swin, and steps that fill a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((6, 8))
        for k, (start, stop) in enumerate(((0, -4), (-4, -2), (-2, None))):
            mask[start:stop, 2:] = k
        out = torch.zeros(x.size(0), 6, 8)
        for t in range(3):
            out[:, t] = torch.tanh(x[:, t]) + out[:, t - 1]
        out[..., 2:4] += x[..., :2]
        out[:, -1:].fill_(1.0).mul_(0.5)
        out.masked_fill_(mask > 1, -1.0)
        return torch.softmax(out, -1)


def _all_in_one_engine(model: torch.nn.Module, x: torch.Tensor, *others: torch.Tensor) -> None:
    optimized = blade.optimize(model.eval(), x, _QUICK)
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"], report
    assert set(report.outside) <= {"prim::If", "prim::RaiseException"}, (
        report
    )  # guards of the capture
    assert not [r for r in report.reasons if r.code in (blade.Code.ALIASES, blade.Code.MUTATES)]
    for other in (x, *others):
        torch.testing.assert_close(optimized(other), model(other), rtol=1e-5, atol=1e-5)
    assert blade.stats(optimized)["cluster_0"]["fallbacks"] == 0


def test_a_fourier_layer_is_one_cluster() -> None:
    torch.manual_seed(0)
    _all_in_one_engine(Fourier(), torch.randn(2, 4, 12), torch.randn(3, 4, 20))


def test_masks_and_buffers_are_one_cluster() -> None:
    torch.manual_seed(0)
    _all_in_one_engine(Masked(), torch.randn(2, 6, 8), torch.randn(5, 6, 8))

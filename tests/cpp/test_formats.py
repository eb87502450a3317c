# SPDX-License-Identifier: Apache-2.0
"""The formats of ``blade.save`` in programs without Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir", "g++", "cmake")

Run = Callable[..., Any]
CONFIG = blade.Config(timing=False, min_cluster_size=1)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.layers(x)
        return z * y, z.softmax(-1)


class Writes(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y.mul_(2)
        return super().forward(x, y)


def _save(model: torch.nn.Module, path: Path, format: str) -> Path:
    samples = torch.randn(4, 16), torch.randn(4, 32)
    blade.save(blade.optimize(model, samples, CONFIG), path, format=format)
    return path


def _check(model: torch.nn.Module, path: Path, run: Run) -> None:
    for rows in (1, 50):
        inputs = torch.randn(rows, 16), torch.randn(rows, 32)
        answer = run(path, *inputs, calls=2, threads=2)
        torch.testing.assert_close(answer.outputs, model(*inputs))
        assert "cluster_0: disc answered 4 of 4 calls\n" in answer.said


def test_an_archive_of_torch_export(run_without_python: Run, tmp_path: Path) -> None:
    model = Two().eval()
    _check(model, _save(model, tmp_path / "model.pt2", "pt2"), run_without_python)


def test_a_package_of_aotinductor(run_without_python: Run, tmp_path: Path) -> None:
    model = Two().eval()
    _check(model, _save(model, tmp_path / "model.pt2", "aoti"), run_without_python)


def test_an_archive_with_ops_around_the_model_says_what_to_save(
    run_without_python: Run, tmp_path: Path
) -> None:
    path = _save(Writes().eval(), tmp_path / "model.pt2", "pt2")
    with pytest.raises(AssertionError, match=r'format="aoti"\) writes a file for C\+\+'):
        run_without_python(path, torch.randn(2, 16), torch.randn(2, 32))

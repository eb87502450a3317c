# SPDX-License-Identifier: Apache-2.0
"""Saved models in programs without Python: values, and who computed them."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir", "g++", "cmake")

Run = Callable[..., Any]


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Softmax(dim=-1)
    ).eval()


def _save(model: torch.nn.Module, folder: Path, backend: str = "disc") -> Path:
    config = blade.Config(optimization_pipeline=backend, timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, torch.randn(8, 64), config)
    assert list(blade.stats(optimized)) == ["cluster_0"]
    torch.jit.save(optimized, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("rows", [1, 200])
def test_an_engine_answers(run_without_python: Run, tmp_path: Path, rows: int) -> None:
    model = _model()
    x = torch.randn(rows, 64)
    answer = run_without_python(_save(model, tmp_path), x, calls=3)
    torch.testing.assert_close(answer.outputs, (model(x),))
    assert "cluster_0: disc answered 3 of 3 calls\n" in answer.said
    assert not answer.warned


def test_what_an_engine_refuses_is_answered_by_the_original(
    run_without_python: Run, tmp_path: Path
) -> None:
    model = _model()
    x = torch.randn(2, 3, 64)  # the engine is for matrices
    answer = run_without_python(_save(model, tmp_path), x, calls=2)
    torch.testing.assert_close(answer.outputs, (model(x),))
    assert "disc answered 0 of 2 calls, the original 2 (guard_rank 2)" in answer.said


@pytest.mark.needs("tvm")
def test_backends_that_need_python_say_so(run_without_python: Run, tmp_path: Path) -> None:
    model = _model()
    x = torch.randn(8, 64)
    answer = run_without_python(_save(model, tmp_path, "tvm"), x)
    torch.testing.assert_close(answer.outputs, (model(x),))
    assert "tvm answered 0 of 1 calls, the original 1 (backend_unavailable 1)" in answer.said
    assert "Engines of 'tvm' need Python" in answer.said


def test_several_outputs_come_in_order(run_without_python: Run, tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x.relu() * 2 + y, (x.sum(-1), [y.exp()])

    x, y = torch.randn(5, 7), torch.randn(5, 7)
    config = blade.Config(timing=False, min_cluster_size=1)
    torch.jit.save(blade.optimize(Two().eval(), (x, y), config), tmp_path / "two.pt")
    answer = run_without_python(tmp_path / "two.pt", x, y)
    torch.testing.assert_close(answer.outputs, (x.relu() * 2 + y, x.sum(-1), y.exp()))


def test_the_runtime_needs_no_python() -> None:
    library = Path(blade.__file__).parent / "libblade_runtime.so"

    def listed(*command: str) -> list[str]:
        done = subprocess.run([*command, str(library)], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    needed = [line for line in listed("readelf", "--dynamic", "--wide") if "(NEEDED)" in line]
    assert any("libtorch_cpu.so" in line for line in needed)
    assert not [line for line in needed if "python" in line.lower()]
    undefined = [line.split()[-1] for line in listed("nm", "--dynamic", "--undefined-only")]
    assert len(undefined) > 100
    assert not [name for name in undefined if name.startswith(("Py", "_Py")) or "pybind11" in name]
    assert any(
        "libblade_runtime.so" in line
        for line in listed("readelf", "--dynamic", "--wide")
        if "SONAME" in line
    )


def test_the_runtimes_sources_hand_no_new_object_to_reclaim() -> None:
    """It takes an object whose count is above 0, and a libtorch with assertions aborts otherwise."""
    sources = list((Path(blade.__file__).parent / "runtime" / "csrc").rglob("*.cpp"))
    assert len(sources) > 30
    assert [path.name for path in sources if "::reclaim(" in path.read_text()] == []

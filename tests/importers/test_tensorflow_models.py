# SPDX-License-Identifier: Apache-2.0
"""SavedModels and Keras files of TensorFlow, which needs 1.6 GB and is not installed in CI."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime", "tensorflow")

QUICK = blade.Config(timing=False, min_cluster_size=1, optimization_pipeline="disc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tensorflow")
    program = Path(__file__).parent / "tensorflow_models.py"
    subprocess.run([sys.executable, str(program), str(made)], check=True, timeout=900)
    return made


@pytest.mark.parametrize("name", ["cnn", "cnn.keras", "bert", "recommender"])
def test_answers_are_those_of_tensorflow(folder: Path, name: str) -> None:
    stem = name.partition(".")[0]
    answers = np.load(folder / "answers.npz")
    kept = {key.partition("/")[2]: answers[key] for key in answers if key.startswith(f"{stem}/")}
    wanted = torch.from_numpy(kept.pop("answer"))
    optimized = blade.optimize(folder / name, kept, QUICK)
    given = {key: torch.from_numpy(one) for key, one in kept.items()}
    torch.testing.assert_close(optimized(**given), wanted, rtol=1e-4, atol=1e-5)
    smaller = {key: one[:1] for key, one in given.items()}
    torch.testing.assert_close(optimized(**smaller), wanted[:1], rtol=1e-4, atol=1e-5)
    assert any(one.backend == "disc" for one in blade.report(optimized).clusters)
    assert "tensorflow" not in sys.modules

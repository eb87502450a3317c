# SPDX-License-Identifier: Apache-2.0
"""Libraries write nothing into the home folder: no ids of the machine, no telemetry."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import blade

_SCRIPT = """
import torch
import blade
from blade.report import engines_of

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
x = torch.randn(4, 8)
for backend in ("onnxruntime", "openvino"):
    config = blade.Config(optimization_pipeline=backend, timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, x, config)
    torch.testing.assert_close(optimized(x), model(x))
    assert [engine.backend() for _, engine in engines_of(optimized)] == [backend]
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] == 1
"""


@pytest.mark.needs("runtime", "onnx", "onnxruntime", "openvino")
def test_optimizing_leaves_nothing_at_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # nothing else of this environment: a library may hold its telemetry back where it sees a CI
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(Path(blade.__file__).parent.parent),
        "BLADE_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*")) == []

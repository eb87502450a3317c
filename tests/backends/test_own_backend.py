# SPDX-License-Identifier: Apache-2.0
"""The example backend, brought along by the entry point of another package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
IN_A_FRESH_PROCESS = """
import sys, torch, blade
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 4), torch.nn.Tanh()).eval()
config = blade.Config(optimization_pipeline="OneDNN", timing=False, min_cluster_size=1, cache=False, strict=True)
optimized = blade.optimize(model, torch.randn(3, 8), config)
torch.jit.save(optimized, sys.argv[1])
loaded = torch.jit.load(sys.argv[1])
for rows in (1, 5, 0):
    x = torch.randn(rows, 8)
    torch.testing.assert_close(loaded(x), model(x))
print(sum(counted["engine_runs"] for counted in blade.stats(loaded).values()))
"""
IN_A_PROCESS_THAT_ONLY_RUNS = """
import sys, torch, blade
assert "throwaway_onednn" not in sys.modules
loaded = torch.jit.load(sys.argv[1])
assert loaded(torch.randn(3, 8)).shape == (3, 4)
print(sum(counted["engine_runs"] for counted in blade.stats(loaded).values()))
"""


@pytest.mark.needs("runtime")
def test_a_backend_of_another_package(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    described = installed / "throwaway-1.0.dist-info"
    described.mkdir(parents=True)
    (installed / "throwaway_onednn.py").write_bytes(
        (ROOT / "examples" / "02_own_backend.py").read_bytes()
    )
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: throwaway\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[blade.backends]\nonednn = throwaway_onednn:OneDnn\n"
        "[blade.runners]\nonednn = throwaway_onednn:load\n"
    )
    for script, runs in ((IN_A_FRESH_PROCESS, 2), (IN_A_PROCESS_THAT_ONLY_RUNS, 1)):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "model.pt")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) == runs

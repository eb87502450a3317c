# SPDX-License-Identifier: Apache-2.0
"""Two processes that need the same engine build it once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("runtime")

PROGRAM = """
import sys, time
sys.path.insert(0, TESTS)
import torch, blade
from fake_backends import Fake, registered

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
fake = Fake("slow", version="1", convert=lambda cluster: time.sleep(1))
config = blade.Config(optimization_pipeline="slow", timing=False, min_cluster_size=1)
print("ready", flush=True)
sys.stdin.readline()
with registered(fake):
    optimized = blade.optimize(model, torch.ones(2, 8), config)
print(len(fake.converted), blade.report(optimized).clusters[0].backend)
"""


def test_the_second_waits_and_loads_it(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("TESTS", repr(tests))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "BLADE_CACHE_DIR": str(tmp_path / "cache")},
        )
        for _ in range(2)
    ]
    for one in running:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    told = []
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in running:
        told.append(one.communicate(timeout=300)[0].split())
    assert sorted(told) == [["0", "slow"], ["1", "slow"]]

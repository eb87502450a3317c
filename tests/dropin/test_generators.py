# SPDX-License-Identifier: Apache-2.0
"""What is optimized in the background takes no random numbers from the program, and gives none back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch, blade

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 96)

    def forward(self, x, end: str = "tanh"):
        q, k, v = self.linear(x).view(2, -1, 2, 48).transpose(1, 2).chunk(3, -1)
        return getattr(torch, end)(torch.nn.functional.scaled_dot_product_attention(q, k, v))

model, config = Attention().eval(), blade.Config(optimization_pipeline="disc", timing=False)
torch.manual_seed(5)
expected = torch.rand(2000)
torch.manual_seed(5)
found = []
with torch.no_grad():
    SETUP
    for _ in range(3):
        found.append(torch.rand(1))
        fast(torch.ones(2, 5, 32), END)
    while not blade.wait(fast, 0.001) and len(found) < 2000:
        found.append(torch.rand(1))
    fast(torch.ones(2, 5, 32), END)
drawn = torch.cat(found)
print(len(drawn) > 10, torch.equal(drawn, expected[: len(drawn)]), ANSWERED)
"""
OPTIMIZE = "fast = blade.optimize(model, (torch.ones(2, 4, 32), 'tanh'), config.evolve({}=True))"
PROGRAMS = {
    "accelerate": (
        "fast = blade.accelerate(model, config=config)",
        "'tanh'",
        "fast.optimized is not None",
    ),
    "background": (
        OPTIMIZE.format("background"),
        "'tanh'",
        "blade.stats(fast)['cluster_0']['engine_runs'] > 0",
    ),
    "background_paths": (
        OPTIMIZE.format("background_paths"),
        "'relu'",
        "blade.stats(fast)['learned']['calls'] > 0",
    ),
}


@pytest.mark.parametrize("entrance", PROGRAMS)
def test_the_program_draws_its_own_numbers_meanwhile(entrance: str, tmp_path: Path) -> None:
    program = PROGRAM
    for name, text in zip(("SETUP", "END", "ANSWERED"), PROGRAMS[entrance]):
        program = program.replace(name, text)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "BLADE_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert ran.stdout.split() == ["True", "True", "True"], ran.stderr

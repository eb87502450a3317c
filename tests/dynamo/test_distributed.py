# SPDX-License-Identifier: Apache-2.0
"""aot_disc under DDP, whose optimizer cuts the graph at buckets of gradients, and under FSDP2, block by block."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_distributed.py"
# without timing: which engines are faster than eager mode depends on the load of the machine
SIZES = (
    "--no-timing --device cpu --width 128 --layers 2 --batch 2 --length 32 --steps 3 --bucket-mb 4"
)

pytestmark = [
    pytest.mark.needs("runtime", "torch_mlir"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo"),
]


@pytest.mark.parametrize(("way", "graphs"), [("ddp", 4), ("fsdp", 2)])
def test_two_processes_train_as_in_eager_mode(way: str, graphs: int) -> None:
    """``graphs``: forward and backward, of DDP's two buckets or of the blocks, which are one code."""
    command = [sys.executable, str(BENCHMARK), *SIZES.split(), "--ways", way]
    done = subprocess.run(
        [*command, "--backends", "eager,aot_disc"], capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert [line["backend"] for line in lines] == ["eager", "aot_disc"], done.stderr[-2000:]
    eager, compiled = lines
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=2e-4)
    assert compiled["losses"][0] != compiled["losses"][1]
    assert compiled["apart"] < 1e-5
    assert compiled["graphs"] == graphs and compiled["fallbacks"] == 0
    inside, total = compiled["ops"].split("/")
    assert inside == total

# SPDX-License-Identifier: Apache-2.0
"""A second start finds the engines: in the cache folder, or in one filled by ``load_cache_artifacts``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
pytestmark = pytest.mark.needs("runtime", "torch_mlir")

START = """
import json, os, sys
import torch, blade
from aot_models import Scores, Trained
from blade.backends import registry
from blade.backends.disc.backend import DiscBackend

conversions = 0
convert = DiscBackend.convert

def counted(*args):
    global conversions
    conversions += 1
    return convert(*args)

DiscBackend.convert = counted
torch.manual_seed(0)
loaded = None
if FOUND:
    with open(FOUND, "rb") as file:
        loaded = torch.compiler.load_cache_artifacts(file.read())
options = {"min_cluster_size": 1, "strict": True}
model, x = Scores().eval(), torch.randn(8, 16)
compiled = torch.compile(model, backend=blade.dynamo.disc, dynamic=True, options=options)
with torch.no_grad():
    for rows in (8, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
trained = torch.compile(Trained(), backend=blade.dynamo.aot_disc, options=options)
trained(x).square().mean().backward()
reports = blade.dynamo.reports()
assert {c.backend for r in reports for c in r.clusters} == {"disc"}, reports
verdicts = [c.verdict.checked for r in reports for c in r.clusters]
saved = torch.compiler.save_cache_artifacts()
if SAVED:
    with open(SAVED, "wb") as file:
        file.write(saved[0])
print(json.dumps({
    "conversions": conversions,
    "loaded": 0 if loaded is None else len(loaded.blade_artifacts),
    "saved": len(saved[1].blade_artifacts),
    "verdicts": verdicts,
    "runs": sum(counts["engine_runs"] for counts in blade.dynamo.stats().values()),
}))
"""


def start(cache: Path, found: Path | None = None, saved: Path | None = None) -> dict[str, Any]:
    names = f"FOUND, SAVED = {str(found or '')!r}, {str(saved or '')!r}"
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{names}\n{START}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BLADE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found_there: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found_there


def test_another_folder_starts_warm_from_artifacts(tmp_path: Path) -> None:
    file = tmp_path / "artifacts"
    first = start(tmp_path / "one", saved=file)
    assert first["conversions"] >= 3  # inference, forward and backward
    second = start(tmp_path / "two", found=file)
    assert (second["conversions"], second["loaded"]) == (0, first["saved"])
    assert second["verdicts"] == first["verdicts"]
    assert second["runs"] > 0


def test_damaged_artifacts_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "artifacts"
    first = start(tmp_path / "one", saved=file)
    data = bytearray(file.read_bytes())
    place = -1
    for _ in range(first["saved"]):
        place = data.index(b"blade-cache-1\n", place + 1)
        data[place + 60] ^= 1  # in the entry's data
    file.write_bytes(data)
    assert start(tmp_path / "two", found=file)["conversions"] == first["conversions"]
    assert not start(tmp_path / "two")["conversions"]  # the same folder again

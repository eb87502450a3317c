# SPDX-License-Identifier: Apache-2.0
"""docs/disc.md is what its script writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "docs" / "make_disc.py"


@pytest.mark.needs("runtime", "torch_mlir", "triton")
def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "disc.md"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    made, committed = path.read_text(encoding="utf-8"), SCRIPT.with_name("disc.md")
    assert made == committed.read_text(encoding="utf-8"), "run: python docs/make_disc.py"

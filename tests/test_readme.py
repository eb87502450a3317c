# SPDX-License-Identifier: Apache-2.0
"""What the README shows and the examples do works, each in a process of its own, as a reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blade.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TIMEOUT_S = 600


def _run(folder: Path, *command: str) -> str:
    """Runs in an empty folder; errors show the whole output."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_readme_has_each_way_in_in_one_block() -> None:
    optimizing, compiling = BLOCKS
    for name in ("optimize", "report", "stats", "Config"):
        assert f"blade.{name}(" in optimizing
    for name in ("disc", "aot_disc"):
        assert f'backend="{name}"' in compiling


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("block", BLOCKS)
def test_readme_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    assert "cluster_0" in _run(tmp_path, str(script))


def test_readme_lists_every_field_and_its_default() -> None:
    rows = dict(re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", README, re.MULTILINE))
    told: dict[str, str] = {}
    for names, defaults in rows.items():
        keys, values = (re.findall(r"`([^`]+)`", cell) for cell in (names, defaults))
        told |= dict(zip(keys, values * len(keys) if len(values) == 1 else values))
    actual = {name: getattr(Config(), name) for name in Config.model_fields}
    assert told == {name: f'"{v}"' if isinstance(v, str) else str(v) for name, v in actual.items()}


@pytest.mark.needs("runtime", "torch_mlir", "minilm")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    out = _run(tmp_path, str(example))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    for pattern, least in SHOWN[example.stem]:
        found = [float(number) for number in re.findall(pattern, out)]
        assert found and min(found) >= least, out


# What an example must have printed, and the least each of these numbers may be. Not
# the speed, nor which engine was chosen, which depends on it.
SHOWN: dict[str, list[tuple[str, float]]] = {
    "01_quickstart": [(r"│\s+(\d\.\d{7}) │", 0.999999)],
    "02_own_backend": [
        (r"(\d+) rows: largest difference \d\.\de-0[6-9]", 1),
        (r"'engine_runs': (\d+)", 3),
    ],
}

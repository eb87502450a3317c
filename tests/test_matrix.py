# SPDX-License-Identifier: Apache-2.0
"""README.md shows what `make matrix` has measured, for the Pythons and torches that the project allows."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
MATRIX = runpy.run_path(str(ROOT / "tests/matrix/run.py"))


def test_the_readme_shows_the_results() -> None:
    table = MATRIX["BEGIN"] + MATRIX["table"](MATRIX["results"]()) + MATRIX["END"]
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_rows_are_what_the_project_allows() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    first, last = MATRIX["PYTHONS"][0], MATRIX["PYTHONS"][-1]
    beyond = f"3.{int(last.partition('.')[2]) + 1}"
    assert f'requires-python = ">={first},<{beyond}"' in project
    listed = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert listed == list(MATRIX["PYTHONS"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"interpreter for .venv, {first} to {last}" in makefile


def test_a_cell_says_what_came_of_its_row() -> None:
    cell = MATRIX["cell"]
    assert cell(None) == ""
    assert cell({"outcome": "passed", "passed": 7, "failed": []}) == "7 pass"
    assert cell({"outcome": "failed", "passed": 7, "failed": ["a", "b"]}) == "7 pass, 2 fail"
    assert cell({"outcome": "no wheel", "passed": 0, "failed": []}) == "no wheel"

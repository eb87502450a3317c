# SPDX-License-Identifier: Apache-2.0
"""docs/tour.md names paths, functions and values that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tour.md"
TEXT = PAGE.read_text(encoding="utf-8")
STAGES = re.findall(
    r"^\| [^|]+ \| `(blade/[^`]*)` \| `([\w.]+)` \| `(\w+)` \| ([^|]+) \|$", TEXT, re.MULTILINE
)
TORCH_VALUES = {"ScriptModule"}


@cache
def _defined(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        targets = [node.target] if isinstance(node, ast.AnnAssign) else []
        targets = node.targets if isinstance(node, ast.Assign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_every_row_of_the_stages_is_checked() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and line.count("|") == 6]
    heads = [line for line in rows if line.startswith(("| stage |", "|---"))]
    assert len(STAGES) == len(rows) - len(heads) > 30


def test_paths_exist() -> None:
    paths = {span for span in re.findall(r"`([^`\s]+)`", TEXT) if re.match(r"[a-z]+/", span)}
    paths |= {f"docs/{link}" for link in re.findall(r"\]\(([^)#:]+)", TEXT)}
    assert len(paths) > 60
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_main_functions_are_defined_in_their_files() -> None:
    missing = [
        f"{folder}{file}: {name}"
        for folder, file, name, _ in STAGES
        if name not in _defined(ROOT / folder / file)
    ]
    assert missing == []


def test_values_that_leave_a_stage_are_classes() -> None:
    classes = set().union(*map(_defined, (ROOT / "blade").rglob("*.py"))) | TORCH_VALUES
    named = {name for *_, value in STAGES for name in re.findall(r"`([A-Z]\w+)`", value)}
    assert len(named) > 20
    assert named - classes == set()

# SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles, as far as they can be checked without a daemon: hadolint, and the files that they copy and name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_linter_finds_nothing(file: Path) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_extras_and_programs_that_they_name_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(FILES) == 3
    text = "".join(file.read_text() for file in FILES)
    named = {name for group in re.findall(r"blade\[([\w,]+)\]", text) for name in group.split(",")}
    assert named and named <= set(extras)
    programs = re.findall(r"python (\S+\.py)", text)
    assert programs == ["wheels/build.py"]
    assert all((ROOT / name).is_file() for name in programs)
    started = re.findall(r"docker build -f (docker/\S+)", text)
    assert sorted(started) == [f"docker/{file.name}" for file in FILES]

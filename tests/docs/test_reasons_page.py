# SPDX-License-Identifier: Apache-2.0
"""docs/reasons.md has a section for every ``Code``, and for nothing else."""

import re
from pathlib import Path

import pytest

from blade.config import Config
from blade.core.reason import Code

PAGE = Path(__file__).parent.parent.parent / "docs" / "reasons.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)


def test_each_code_has_one_section_and_each_section_a_code() -> None:
    assert sorted(title for title, _ in SECTIONS) == sorted(f"`{code.value}`" for code in Code)


def test_each_section_says_what_it_means_and_what_to_do() -> None:
    unclear = [
        title
        for title, text in SECTIONS
        if not re.fullmatch(r"[\w`].+\.\n\nWhat to do: [\w`].+\.\n+", text, re.DOTALL)
    ]
    assert unclear == []


@pytest.mark.parametrize("pattern", [r"Config\((\w+)=", r"Config\.(\w+)"])
def test_settings_that_it_names_exist(pattern: str) -> None:
    named = set(re.findall(pattern, TEXT))
    assert named
    assert named <= set(Config.model_fields)

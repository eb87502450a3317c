# SPDX-License-Identifier: Apache-2.0
"""The programs that FORMAT.md shows are programs, and show every instruction, slot and section."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import blade
from blade.runtime.engine import make_engine

[PAGE] = Path(blade.__file__).parent.rglob("FORMAT.md")
PROGRAMS = re.findall(r"^```\n(blade\.disc .*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)

pytestmark = pytest.mark.needs("runtime")


def engine_of(program: str, *constants: torch.Tensor) -> Any:
    return make_engine("example", "disc", program, b"", constants)


def test_the_first_example_computes_what_it_says() -> None:
    x, w = torch.randn(5, 3), torch.randn(3, 2)
    engine = engine_of(PROGRAMS[0], w)
    [got] = engine.try_execute([x])
    torch.testing.assert_close(got, torch.relu(x @ w))
    assert engine.try_execute([torch.randn(5, 4)]) is None
    assert engine.stats()["guard_shape"] == 1


def test_the_last_example_has_a_size_that_depends_on_elements() -> None:
    engine = engine_of(PROGRAMS[-1])
    for x in (torch.randn(5), -torch.ones(3), torch.ones(1)):
        [got] = engine.try_execute([x])
        torch.testing.assert_close(got, x[x > 0].exp())


@pytest.mark.parametrize("program", PROGRAMS[1:-1])
def test_the_others_lack_nothing_but_their_code(program: str) -> None:
    constants = [torch.randn(3, 2)] if " const " in program.split("slots")[1] else []
    why = engine_of(program, *constants).why_unavailable()
    assert why
    assert "does not parse" not in why
    broken = engine_of(program.replace("outputs 1 3", "outputs 1 9"), *constants)
    assert "does not parse" in broken.why_unavailable()


@pytest.mark.parametrize(
    "word",
    [
        *("kernel", "call", "launch", "when", "draw", "pack", "guard", "arena", "output", "dyn"),
        "late",
    ],
)
def test_an_example_has_it(word: str) -> None:
    assert any(
        re.search(rf"^((slot|when|reg) \d+ |draw )?{word}( |$)", program, re.M)
        for program in PROGRAMS
    )

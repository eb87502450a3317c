# SPDX-License-Identifier: Apache-2.0
"""The result of a command: its exit code, and its answer as data and as text."""

import io
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class ExitCode(IntEnum):
    """The exit codes of ``python -m blade``; stable, for scripts."""

    OK = 0  # done
    FOUND = 1  # done, and the answer is bad news: doctor, bisect, bench --require
    USAGE = 2  # an option or a field of the config is wrong
    INPUT = 3  # a file, the model or the samples cannot be used
    BACKEND = 4  # a backend that was named, or blade's own runtime, cannot work here
    UNCLEAR = 5  # too noisy to tell: bench --require
    INTERNAL = 70  # a bug in blade
    INTERRUPTED = 130  # Ctrl-C


@dataclass(frozen=True)
class CommandResult:
    """``--json`` prints ``data``; without it ``text`` is printed."""

    data: Mapping[str, Any]
    text: str
    code: ExitCode = ExitCode.OK


def to_text(*parts: RenderableType) -> str:
    """``parts`` as plain text, as wide as the terminal; strings are not read as markup."""
    wide = shutil.get_terminal_size((118, 24)).columns if sys.stdout.isatty() else 118
    out = Console(file=io.StringIO(), width=max(wide, 60), force_terminal=False, color_system=None)
    for part in parts:
        out.print(Text(part) if isinstance(part, str) else part)
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())


def printable(text: str) -> str:
    """``text`` without control characters, with which a file could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the style of the reports; the last column takes the remaining width."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(columns):
        ratio = 1 if i == len(columns) - 1 else None
        table.add_column(name, justify="right" if name in right else "left", ratio=ratio)
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add cells verbatim: text that looks like markup stays text."""
    table.add_row(*(Text(str(cell)) for cell in cells))

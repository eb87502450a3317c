# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr while something takes long; nothing where stderr is no terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from blade.progress import Step, watched

# Redrawing takes a core for a millisecond, and the work may be a measurement.
REDRAWS_PER_SECOND = 2


@contextmanager
def progress_bar(title: str) -> Iterator[None]:
    """Shows the steps that are announced inside the block."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        Elapsed(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=REDRAWS_PER_SECOND
    ) as bar:
        task = bar.add_task(title, total=None, what="")

        def show(step: Step) -> None:
            # markup would be read in a description
            what = Text(step.what).plain
            bar.update(
                task,
                description=f"{title}: {step.stage}",
                completed=step.done,
                total=step.total or None,
                what=what,
            )

        with watched(show):
            yield

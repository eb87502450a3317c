# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr during long steps; none if stderr is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from blade.core.progress import Step, watched

# Redrawing occupies a core for a millisecond, which may disturb a measurement.
REDRAWS_PER_SECOND = 2


@contextmanager
def progress_bar(title: str) -> Iterator[None]:
    """Show the steps that are announced inside the block."""
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
            # a description would be parsed as markup
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

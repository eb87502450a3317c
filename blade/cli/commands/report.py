# SPDX-License-Identifier: Apache-2.0
"""``python -m blade report OUT.pt [--all] [--html FILE]``: show what runs where, how fast, and why."""

import argparse
import json
from pathlib import Path

from blade.cli.shared.files import check_output, read_report, write
from blade.cli.shared.options import Commands, add_command
from blade.cli.shared.result import CommandResult, printable
from blade.errors import InputError
from blade.report import Report

TEXT = """Print the report that an optimized file carries, or write it as a page.

The page is one file that needs nothing else and no network: the graph by backend, times per cluster,
speed-up by size, time by kernel, and every reason against an alternative.
The file is read as data: nothing in it runs."""

PAGES = (".html", ".htm")


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "report", TEXT)
    parser.add_argument("file", metavar="OUT.pt", help="a file that optimize wrote")
    parser.add_argument(
        "--all", action="store_true", help="print everything: ops, layers, kernels, every reason"
    )
    parser.add_argument("--html", metavar="FILE", help="write the page to FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it is no page")
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    page = None if args.html is None else Path(args.html)
    if page is not None:
        check_page(page, force=args.force)
    shown = read_report(Path(args.file))
    data = json.loads(shown.to_json())
    if page is None:
        return CommandResult(data, printable(shown.explain() if args.all else str(shown)))
    write_page(shown, page, force=args.force)
    return CommandResult({**data, "html": str(page)}, f"{page}: {page.stat().st_size / 1e3:.0f} kB")


def check_page(path: Path, *, force: bool) -> None:
    """Allow an earlier page to be overwritten; any other file, such as a model, only with ``force``."""
    if path.exists() and path.suffix.lower() not in PAGES and not force:
        raise InputError(
            f"{path}: the file exists and is not named like a page ({', '.join(PAGES)}); give another "
            "name, or --force to overwrite it"
        )
    check_output(path, force=True)


def write_page(shown: Report, path: Path, *, force: bool) -> None:
    check_page(path, force=force)
    write(path, lambda place: place.write_text(shown.to_html(), encoding="utf-8"), force=True)

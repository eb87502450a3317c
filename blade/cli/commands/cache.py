# SPDX-License-Identifier: Apache-2.0
"""``python -m blade cache [--clear [--unused-days N]]``: show what is kept on disk, and remove it."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from blade.cli.shared.options import Commands, UsageError, add_command
from blade.cli.shared.result import CommandResult, add_row, plain_table, to_text
from blade.core.disk_cache import LOCKS, Entry, limit_bytes, open_cache
from blade.errors import InputError

TEXT = """Show what is kept on disk, so that a model is optimized faster the next time, or remove it.

The folder is BLADE_CACHE_DIR, by default ~/.cache/blade, and holds at most BLADE_CACHE_LIMIT_GB GiB (1 by
default): what was not used for longest goes first. Nothing breaks without it; the next optimize takes longer."""

KINDS = {
    "cluster": "engines",
    "refused": "clusters that a backend has no engine for",
    "decision": "choices between engines",
    "trace": "captured models",
    "facts": "sizes and types of values",
    "kernel": "compiled kernels",
}
DAY_S = 86400.0


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "cache", TEXT)
    parser.add_argument("--clear", action="store_true", help="remove the entries")
    parser.add_argument(
        "--unused-days",
        type=float,
        metavar="N",
        help="with --clear: those that were not used in the last N days, and no others",
    )
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    days = args.unused_days
    if days is not None and (not args.clear or not days >= 0):
        raise UsageError("--unused-days: takes a number of days, and --clear")
    cache = open_cache()
    if cache is None:
        raise InputError(
            "there is no folder for the cache: BLADE_CACHE_DIR is not set, nor is HOME"
        )
    removed = cache.clear((days or 0.0) * DAY_S) if args.clear else []
    entries = [one for one in cache.entries() if one.kind != LOCKS]
    data = {
        "folder": str(cache.folder),
        "limit_bytes": limit_bytes(),
        "bytes": sum(one.bytes for one in entries),
        "kinds": _by_kind(entries),
        "removed": {"entries": len(removed), "bytes": sum(one.bytes for one in removed)},
    }
    return CommandResult(data, _render(data, cleared=args.clear))


def _by_kind(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    rows = []
    for kind in sorted({one.kind for one in entries}):
        own = [one for one in entries if one.kind == kind]
        rows.append(
            {
                "kind": kind,
                "what": KINDS.get(kind, kind),
                "entries": len(own),
                "bytes": sum(one.bytes for one in own),
                "last_used": _time(max(one.used for one in own)),
                "first_to_go": _time(min(one.used for one in own)),
            }
        )
    return rows


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")


def _render(data: dict[str, Any], *, cleared: bool) -> str:
    removed = data["removed"]
    lines = [f"{data['folder']}: {_size(data['bytes'])} of {_size(data['limit_bytes'])}"]
    if cleared:
        lines.append(f"removed: {removed['entries']} entries, {_size(removed['bytes'])}")
    table = plain_table("kept", "entries", "size", "last used", right=("entries", "size"))
    for row in data["kinds"]:
        add_row(table, row["what"], row["entries"], _size(row["bytes"]), row["last_used"])
    return to_text("\n".join(lines), *([table] if data["kinds"] else []))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"

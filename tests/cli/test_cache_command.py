# SPDX-License-Identifier: Apache-2.0
"""``python -m blade cache``: what is kept on disk, and how it goes."""

import os
from pathlib import Path
from time import time

import pytest
from command_line import Command

from blade.core.disk_cache import DiskCache, digest

DAY_S = 86400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("BLADE_CACHE_DIR", str(tmp_path / "cache"))
    made = DiskCache(tmp_path / "cache")
    for kind, size in (("cluster", 3000), ("cluster", 1000), ("kernel", 500)):
        made.put(kind, digest([kind, str(size)]), bytes(size))
    with made.locked("decision", digest(["a"]), 0):
        pass
    return made


def test_what_is_kept_is_shown(blade_cli: Command, cache: DiskCache) -> None:
    done = blade_cli("cache")
    assert done.code == 0
    assert f"{cache.folder}: 0.0 MB of 1073.7 MB" in done.out
    assert "engines" in done.out and "compiled kernels" in done.out
    data = blade_cli("cache", "--json").data
    assert data["bytes"] == sum(one.bytes for one in cache.entries())
    assert [(row["kind"], row["entries"]) for row in data["kinds"]] == [
        ("cluster", 2),
        ("kernel", 1),
    ]


def test_it_is_cleared_whole_or_of_what_is_old(blade_cli: Command, cache: DiskCache) -> None:
    [kernel] = (one for one in cache.entries() if one.kind == "kernel")
    os.utime(kernel.path, (time() - 5 * DAY_S,) * 2)
    data = blade_cli("cache", "--clear", "--unused-days", "3", "--json").data
    assert (data["removed"]["entries"], [row["kind"] for row in data["kinds"]]) == (1, ["cluster"])
    done = blade_cli("cache", "--clear")
    assert done.code == 0 and "removed: 3 entries" in done.out
    assert blade_cli("cache", "--json").data["kinds"] == []


@pytest.mark.parametrize("argv", [("--unused-days", "3"), ("--clear", "--unused-days", "-1")])
def test_days_without_a_meaning_are_refused(
    blade_cli: Command, cache: DiskCache, argv: tuple[str, ...]
) -> None:
    done = blade_cli("cache", *argv)
    assert done.code == 2 and "--unused-days: takes a number of days, and --clear" in done.err
    assert len(cache.entries()) == 4  # the lock, too


def test_a_wrong_limit_is_told(
    blade_cli: Command, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLADE_CACHE_LIMIT_GB", "plenty")
    done = blade_cli("cache")
    assert done.code == 2 and "'plenty'" in done.err

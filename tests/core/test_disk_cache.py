# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: what comes out is what went in, or nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blade.core import disk_cache as module
from blade.core.disk_cache import (
    DiskCache,
    code_version,
    digest,
    folder,
    open_cache,
)

KEY, OTHER = digest(["a"]), digest(["b"])


def entry(cache: DiskCache, key: str = KEY) -> Path:
    [path] = cache.folder.glob(f"*/*/{key}")
    return path


def test_what_was_put_is_found_by_kind_and_key(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new" / "folder")
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, b"code")
    assert cache.get("kernel", KEY) == b"code"
    assert cache.get("kernel", OTHER) is None
    assert cache.get("cluster", KEY) is None
    assert (cache.hits, cache.misses) == (1, 3)
    cache.put("kernel", KEY, b"")
    assert cache.get("kernel", KEY) == b""
    assert cache.folder.stat().st_mode & 0o077 == 0  # what is in it will run: its owner's alone


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"x" + data[1:],
        lambda data: data + b"more",
    ],
    ids=["truncated", "cut in the head", "empty", "flipped", "other magic", "longer"],
)
def test_a_damaged_entry_is_missing_and_can_be_written_again(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    cache = DiskCache(tmp_path)
    cache.put("kernel", KEY, b"some code")
    path = entry(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, b"some code")
    assert cache.get("kernel", KEY) == b"some code"


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    cache = DiskCache(taken)
    cache.put("kernel", KEY, b"code")
    assert cache.get("kernel", KEY) is None
    assert taken.read_text() == "not a folder"


def test_the_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    cache.put("kernel", KEY, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", OTHER, b"code")
    assert len(list(tmp_path.glob("*/*/*"))) == 1


def test_the_entries_unused_for_longest_go_first(tmp_path: Path) -> None:
    data = bytes(1000)
    keys = [digest([str(i)]) for i in range(8)]
    writer = DiskCache(tmp_path)
    for age, key in enumerate(keys):
        writer.put("kernel", key, data)
        os.utime(entry(writer, key), (1000 + age, 1000 + age))
    assert writer.get("kernel", keys[0]) == data  # used just now
    cache = DiskCache(tmp_path, limit=5000)
    cache.put("kernel", KEY, data)
    left = {path.name for path in tmp_path.glob("*/*/*")}
    assert left == {KEY, keys[0], keys[7]}
    for key in map(str, range(20)):
        cache.put("kernel", digest([key, "more"]), data)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 5000 + 2 * 1100


def test_processes_share_it(tmp_path: Path) -> None:
    """Writers of one key at the same time: readers see a whole entry or none."""
    code = (
        "import sys; from pathlib import Path; from blade.core.disk_cache import DiskCache\n"
        f"cache = DiskCache(Path({str(tmp_path)!r}))\n"
        "for i in range(200):\n"
        f"    cache.put('kernel', {KEY!r}, bytes([int(sys.argv[1])]) * 50000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(i)]) for i in (1, 2)]
    cache, seen = DiskCache(tmp_path), set()
    while any(writer.poll() is None for writer in writers):
        data = cache.get("kernel", KEY)
        if data is not None:
            assert len(data) == 50000 and len(set(data)) == 1
            seen.add(data[0])
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen <= {1, 2} and cache.get("kernel", KEY) is not None
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [entry(cache)]  # nothing half-done


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLADE_CACHE_DIR", str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine"
    assert open_cache() is open_cache() and open_cache(False) is None
    monkeypatch.delenv("BLADE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "blade"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nobody knows a home
    assert folder() is None and open_cache() is None


def test_a_key_tells_where_its_parts_end() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"]) != digest(["abc"])
    assert digest(["a"]) == digest([b"a"]) == KEY
    assert code_version() == code_version() and len(code_version()) == 64


def test_another_version_of_the_code_makes_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_version()
    (tmp_path / "cache.py").write_text("changed")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "core" / "disk_cache.py"))
    code_version.cache_clear()
    assert code_version() != before
    code_version.cache_clear()

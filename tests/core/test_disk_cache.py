# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: what comes out is what went in, or nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from time import time

import pytest

from blade.core import disk_cache as module
from blade.core.disk_cache import (
    DiskCache,
    code_version,
    digest,
    folder,
    open_cache,
)
from blade.errors import ConfigError

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


@pytest.mark.parametrize(("text", "limit"), [("0.5", 1 << 29), ("2", 1 << 31), ("", 1 << 30)])
def test_the_limit_is_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: int
) -> None:
    monkeypatch.setenv("BLADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("BLADE_CACHE_LIMIT_GB", text)
    cache = open_cache()
    assert cache is not None and cache.limit == limit
    assert open_cache(limit_gb=0.25) is cache and cache.limit == 1 << 28


@pytest.mark.parametrize("text", ["0", "-1", "much", "nan", "inf"])
def test_a_limit_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BLADE_CACHE_LIMIT_GB", text)
    with pytest.raises(ConfigError, match="BLADE_CACHE_LIMIT_GB: a number of GiB above 0"):
        module.limit_bytes()


def test_what_was_not_used_lately_can_be_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put("kernel", KEY, b"old")
    cache.put("cluster", OTHER, b"new")
    day = 86400
    os.utime(entry(cache), (time() - 3 * day,) * 2)
    assert [one.kind for one in cache.entries()] == ["cluster", "kernel"]
    assert [one.kind for one in cache.clear(2 * day)] == ["kernel"]
    assert cache.get("kernel", KEY) is None and cache.get("cluster", OTHER) == b"new"
    assert len(cache.clear()) == 1 and not cache.entries()


def test_a_lock_keeps_others_out_until_they_have_waited_enough(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    with cache.locked("decision", KEY, wait_s=60) as waited:
        assert not waited
        with cache.locked("decision", OTHER, wait_s=60) as other:
            assert not other
        with cache.locked("decision", KEY, wait_s=0) as again:  # it goes on without
            assert again
    with cache.locked("decision", KEY, wait_s=60) as waited:
        assert not waited


def test_the_lock_of_a_process_goes_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from blade.core.disk_cache import DiskCache\n"
        f"with DiskCache(Path({str(tmp_path)!r})).locked('decision', {KEY!r}, wait_s=0):\n"
        "    print('in', flush=True); time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "in\n"
    end = threading.Timer(0.3, holder.kill)
    end.start()
    with DiskCache(tmp_path).locked("decision", KEY, wait_s=600) as waited:
        assert waited and holder.wait() < 0


def test_without_a_private_folder_nobody_waits(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    cache = DiskCache(tmp_path)
    with cache.locked("decision", KEY, 60) as waited, cache.locked("decision", KEY, 60) as again:
        assert not waited and not again
    assert not list(tmp_path.iterdir())

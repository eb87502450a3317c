# SPDX-License-Identifier: Apache-2.0
"""The cache is used where its user alone may write, and says so where others may."""

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.cli.main import run
from blade.core import private_files as private
from blade.core.disk_cache import (
    DiskCache,
    digest,
    open_cache,
    untrusted,
)
from blade.core.private_files import why_not_private
from blade.core.reason import Code

KEY, OTHER = digest(["a"]), digest(["b"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that passes, with one entry in it."""
    made = tmp_path / "cache"
    DiskCache(made).put("kernel", KEY, b"code")
    assert DiskCache(made).get("kernel", KEY) == b"code"
    return made


def entry(root: Path, key: str = KEY) -> Path:
    return root / "kernel" / key[:2] / key


def assert_unused(root: Path, word: str) -> None:
    cache = DiskCache(root)
    why = why_not_private(root)
    assert why is not None and word in why
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", OTHER, b"more")
    assert not entry(root, OTHER).exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o775, 0o720, 0o702, 0o1770])
def test_a_folder_that_others_may_write_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    assert_unused(root, "chmod go-w")
    root.chmod(mode & ~0o1022)
    assert DiskCache(root).get("kernel", KEY) == b"code"


def test_a_link_to_such_a_folder_is_refused(root: Path, tmp_path: Path) -> None:
    link, again = tmp_path / "link", tmp_path / "again"
    link.symlink_to(root)
    again.symlink_to("link")
    assert DiskCache(again).get("kernel", KEY) == b"code"
    root.chmod(0o777)
    assert_unused(again, str(root))


def test_a_link_that_another_user_made_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(root)
    own = os.lstat

    def looked_at(path: str) -> object:
        found = own(path)
        if not stat.S_ISLNK(found.st_mode):
            return found
        return SimpleNamespace(st_mode=found.st_mode, st_uid=os.geteuid() + 1, st_gid=0)

    monkeypatch.setattr(private.os, "lstat", looked_at)
    assert_unused(tmp_path / "link", "another user")


def test_the_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert_unused(root, "another user")


@pytest.mark.parametrize("below", ["cache", "a/cache"])
def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path, below: str) -> None:
    above = tmp_path / "above"
    above.mkdir()
    root = above / below
    DiskCache(root).put("kernel", KEY, b"code")
    above.chmod(0o777)
    assert_unused(root, "put in the place")
    above.chmod(0o1777)  # as /tmp
    assert DiskCache(root).get("kernel", KEY) == b"code"


def test_a_folder_to_be_made_is_not_made_where_others_may_replace_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert_unused(tmp_path / "new" / "cache", "put in the place")
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o700)


def test_a_parent_that_the_users_own_group_may_write_is_no_matter(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``~/.cache`` is with umask 0002."""
    tmp_path.chmod(0o775)
    gid = tmp_path.stat().st_gid
    me = SimpleNamespace(pw_name="me", pw_gid=gid)
    monkeypatch.setattr(private.pwd, "getpwuid", lambda uid: me)
    groups = {"me": [], "staff": [], "shared": ["me", "you"]}
    for name, allowed in (("me", True), ("staff", False)):
        group = SimpleNamespace(gr_name=name, gr_mem=groups[name])
        monkeypatch.setattr(private.grp, "getgrgid", lambda gid, group=group: group)
        assert (DiskCache(root).get("kernel", KEY) == b"code") is allowed
    shared = SimpleNamespace(gr_name="me", gr_mem=groups["shared"])
    monkeypatch.setattr(private.grp, "getgrgid", lambda gid: shared)
    assert_unused(root, "group")


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_what_is_made_is_the_users_alone(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "not" / "there" / "yet"
    before = os.umask(mask)
    try:
        DiskCache(root).put("kernel", KEY, b"code")
    finally:
        os.umask(before)
    made = [tmp_path / "not", *(tmp_path / "not").rglob("*")]
    assert entry(root) in made
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert DiskCache(root).get("kernel", KEY) == b"code"


def replaced_by_a_link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def replaced_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (replaced_by_a_link, "link"),
        (replaced_by_a_fifo, "no regular file"),
        (replaced_by_a_folder, "directory"),
        (lambda path: path.chmod(0o620), "may be written by others"),
        (lambda path: path.chmod(0o602), "may be written by others"),
        (lambda path: replaced_by_a_link(path.parent), "link"),
        (lambda path: replaced_by_a_link(path.parent.parent), "link"),
    ],
    ids=["link", "fifo", "folder", "group", "others", "folder a link", "kind a link"],
)
def test_an_entry_that_is_not_what_was_written_is_missing(
    root: Path,
    change,
    word: str,  # type: ignore[no-untyped-def]
) -> None:
    change(entry(root))
    cache = DiskCache(root)
    assert cache.get("kernel", KEY) is None  # and does not wait for a writer of the FIFO
    assert word == "directory" or word in cache.refused[f"kernel/{KEY[:2]}/{KEY}"]


def test_folders_within_count_where_others_get_in(root: Path) -> None:
    """Old ones made with umask 0002 are good enough in a folder that is closed to others."""
    entry(root).parent.chmod(0o775)
    assert DiskCache(root).get("kernel", KEY) == b"code"
    root.chmod(0o755)
    assert DiskCache(root).get("kernel", KEY) is None
    entry(root).parent.chmod(0o700)
    assert DiskCache(root).get("kernel", KEY) == b"code"


def test_what_goes_is_never_outside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "aa"
    outside.mkdir(parents=True)
    (outside / "precious").write_bytes(bytes(5000))
    (root / "link").symlink_to(tmp_path / "outside")
    DiskCache(root, limit=10).put("kernel", OTHER, bytes(1000))
    assert (outside / "precious").exists() and not entry(root).exists()


@pytest.mark.needs("runtime")
@pytest.mark.needs("torch_mlir")
@produces(Code.CACHE_UNTRUSTED)
def test_the_report_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("BLADE_CACHE_DIR", str(shared))
    config = blade.Config(timing=False, min_cluster_size=1, optimization_pipeline="DISC")
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval(), torch.randn(2, 4)

    def said(config: blade.Config) -> list[blade.Reason]:
        optimized = blade.optimize(model, x, config)
        torch.testing.assert_close(optimized(x), model(x))
        return [r for r in blade.report(optimized).all_reasons() if r.code is Code.CACHE_UNTRUSTED]

    [reason] = said(config)
    assert str(shared) in reason.detail and "chmod go-w" in reason.detail
    assert list(shared.iterdir()) == []
    assert said(config.evolve(cache=False)) == []
    shared.chmod(0o700)
    assert said(config) == [] and list(shared.iterdir())


def test_refused_entries_are_said_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLADE_CACHE_DIR", str(root))
    entry(root).chmod(0o666)
    cache = open_cache()
    assert cache is not None and cache.get("kernel", KEY) is None
    [reason] = untrusted()
    assert reason.code is Code.CACHE_UNTRUSTED and KEY in reason.detail
    assert untrusted() == () and untrusted(False) == ()
    cache.put("kernel", KEY, b"new")
    assert cache.get("kernel", KEY) == b"new"


def test_doctor_says_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLADE_CACHE_DIR", str(root))
    run(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["cache"]["untrusted"] is None
    root.chmod(0o777)
    run(["doctor"])
    assert "not used: " in capsys.readouterr().out

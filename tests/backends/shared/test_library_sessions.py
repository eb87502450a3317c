# SPDX-License-Identifier: Apache-2.0
"""Whether a library is here, and what is made with it once per key."""

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blade.backends.shared.library_sessions import LibrarySessions, OptionalLibrary


def test_the_first_package_that_is_there_has_the_version() -> None:
    numpy = OptionalLibrary("numpy", "ndarray", ("numpy-that-nobody-made", "numpy"))
    assert numpy.why_not_loadable() is None
    assert numpy.stamp() == {"numpy": version("numpy")}


def test_what_is_missing_is_named_with_the_fix() -> None:
    missing = OptionalLibrary("no_such_module", "Core", ("no-such-package",))
    assert missing.why_not_loadable() == (
        "no_such_module is not installed: pip install no-such-package"
    )
    with pytest.raises(PackageNotFoundError):
        missing.stamp()


def test_a_library_that_is_not_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hollow", ModuleType("hollow"))
    why = OptionalLibrary("hollow", "Core", ("numpy",)).why_not_loadable()
    assert why is not None and "cannot be loaded" in why and "--force-reinstall numpy" in why


def test_what_a_library_brings_uninvited_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to do without, as where that is not installed; who wants it can import it afterwards."""
    (tmp_path / "tells_home.py").write_text("")
    (tmp_path / "chatty.py").write_text(
        "try:\n    import tells_home as told\nexcept ImportError:\n    told = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    chatty = OptionalLibrary("chatty", "told", ("numpy",), without=("tells_home",))
    try:
        assert chatty.why_not_loadable() is None
        assert chatty.load().told is None
        assert "tells_home" not in sys.modules
        assert importlib.import_module("tells_home").__file__ is not None
    finally:
        for name in ("chatty", "tells_home"):
            sys.modules.pop(name, None)


def test_one_session_per_key_whichever_threads_ask() -> None:
    made: list[int] = []
    together = threading.Barrier(4)

    def start(key: int) -> object:
        made.append(key)
        return object()

    def ask(key: int) -> object:
        together.wait()
        return sessions.at(key)

    sessions = LibrarySessions([], start)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, [1, 2, 1, 2]))
    assert sorted(made) == [1, 2]
    assert got[0] is got[2] and got[1] is got[3] and got[0] is not got[1]


def test_written_weights_make_sessions_stale() -> None:
    weight = torch.randn(3)
    sessions = LibrarySessions([weight], lambda key: float(weight[key]))
    before = sessions.at(0)
    weight.add_(1)
    assert sessions.at(0) == pytest.approx(before + 1)
    assert sessions.at(1) == float(weight[1])


def test_a_start_that_fails_is_tried_again() -> None:
    tries: list[str] = []

    def start(key: str) -> str:
        tries.append(key)
        if len(tries) == 1:
            raise RuntimeError("no memory")
        return key

    sessions = LibrarySessions([], start)
    with pytest.raises(RuntimeError, match="no memory"):
        sessions.at("a")
    assert sessions.at("a") == "a"

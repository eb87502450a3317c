# SPDX-License-Identifier: Apache-2.0
"""registry: lazy, case-insensitive, and clear about what is missing."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from blade.backends import registry
from blade.errors import BackendError


class Other:
    """A backend of another package, as far as the registry cares."""

    name = "Other"

    def why_unavailable(self) -> str | None:
        return "other needs a licence file."


@pytest.fixture
def other() -> Iterator[Other]:
    backend = Other()
    registry.register(backend)  # type: ignore[arg-type]
    yield backend
    registry.unregister("OTHER")


def test_built_in_backends_come_first(other: Other) -> None:
    assert registry.names()[0] == "disc"
    assert registry.names()[-1] == "other"
    assert registry.load("oTHER") is other


def test_unavailable_says_why(other: Other) -> None:
    assert registry.available("other") == "other needs a licence file."


def test_unknown_names_the_nearest_and_all() -> None:
    with pytest.raises(BackendError, match="there is no backend 'dics': did you mean 'disc'"):
        registry.load("dics")
    sentence = registry.available("zzz")
    assert sentence is not None
    assert "Known are: disc" in sentence


def test_an_entry_point_is_imported_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "plug": EntryPoint("Plug", f"{__name__}:Other", registry.ENTRY_POINTS),
        "gone": EntryPoint("gone", "no_such_package.mod:Backend", registry.ENTRY_POINTS),
        "typo": EntryPoint("typo", f"{__name__}:Ohter", registry.ENTRY_POINTS),
    }
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    assert registry.load("Plug").why_unavailable() == "other needs a licence file."
    assert registry.load("plug") is registry.load("PLUG")
    for name in ("gone", "typo"):
        with pytest.raises(BackendError, match=f"backend '{name}' cannot be imported from"):
            registry.load(name)
        assert registry.available(name) is not None


def test_asking_for_names_imports_no_backend() -> None:
    code = (
        "import sys; from blade.backends import registry; registry.names(); "
        "sys.exit('blade.backends.disc.backend' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

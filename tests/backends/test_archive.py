# SPDX-License-Identifier: Apache-2.0
"""Payloads as archives: what is damaged or of another version says so."""

import pytest

from blade.backends.shared.archive import EngineArchive, read
from blade.errors import BackendError

DATA = EngineArchive(
    {"lib": "1.2"}, {"orders": [None, [1, 0]]}, {"model.so": b"code" * 100}
).to_bytes()


def test_it_comes_back_as_it_was() -> None:
    archive = read(DATA, {"lib": "1.2"}, "lib", {"model.so"})
    assert archive.facts == {"orders": [None, [1, 0]]}
    assert archive.files == {"model.so": b"code" * 100}
    assert len(DATA) < 600


@pytest.mark.parametrize(
    "data",
    [b"", DATA[:-40], b"x" + DATA[30:], DATA.replace(b"engine", b"ignite")],
    ids=["empty", "cut", "shifted", "renamed"],
)
def test_damage_is_told(data: bytes) -> None:
    with pytest.raises(BackendError, match="what lib compiled is damaged"):
        read(data, {"lib": "1.2"}, "lib", {"model.so"})


@pytest.mark.parametrize("here", [{"lib": "1.3"}, {"lib": "1.2", "other": "0"}])
def test_another_version_is_told(here: dict[str, str]) -> None:
    with pytest.raises(BackendError, match="optimize the model again"):
        read(DATA, here, "lib", {"model.so"})

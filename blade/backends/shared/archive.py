# SPDX-License-Identifier: Apache-2.0
"""The payload of an engine as an archive of files, with the versions it was made with and a few facts.

data = EngineArchive({"torch": torch.__version__}, {"orders": [None]}, {"model.so": code}).to_bytes()
archive = read(data, {"torch": torch.__version__}, "AOTInductor", {"model.so"})    # BackendError: not for here

An archive may be hand-made, so reading checks it: it contains only files that the backend knows, each once
and plain, of a limited total size.
"""

import io
import json
import stat
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from blade.errors import BackendError

_HEAD = "engine.json"
MAX_BYTES = 1 << 31  # of all files together, unpacked
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # bit of ZipInfo.flag_bits


@dataclass(frozen=True)
class EngineArchive:
    """``stamp``: versions by name, which must be the same where it is loaded. ``facts``: JSON."""

    stamp: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        head = {"stamp": dict(self.stamp), "facts": dict(self.facts)}
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as zipped:
            for name, data in {_HEAD: json.dumps(head).encode(), **self.files}.items():
                # without a timestamp, so that equal contents are equal bytes
                zipped.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        return made.getvalue()


def read(data: bytes, here: Mapping[str, str], who: str, names: Collection[str]) -> EngineArchive:
    """Read an archive. Raises ``BackendError`` if it is damaged, contains other files than ``names``, or was
    made by ``who`` with other versions than ``here``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            infos = _checked(zipped.infolist(), {_HEAD, *names})
            files = {info.filename: zipped.read(info) for info in infos}
        head = json.loads(files.pop(_HEAD))
        stamp, facts = head["stamp"], head["facts"]
        if not isinstance(stamp, dict) or not isinstance(facts, dict):
            raise ValueError("its head is in another form")
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, LookupError, TypeError, ValueError),
        *(RecursionError, NotImplementedError, RuntimeError),
    ) as error:
        raise BackendError(f"what {who} compiled is damaged ({error}).") from error
    archive = EngineArchive(stamp, facts, files)
    for name, version in here.items():
        if (made := archive.stamp.get(name)) != version:
            raise BackendError(
                f"{who} compiled it for {name} {made}, and this is {name} {version}: optimize the model again."
            )
    return archive


def _checked(infos: list[zipfile.ZipInfo], names: Collection[str]) -> list[zipfile.ZipInfo]:
    """``infos`` if they are plain files of these ``names``; raises ``ValueError``."""
    found = [info.filename for info in infos]
    if len(set(found)) != len(found):
        raise ValueError("it holds two files of one name")
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.filename not in names:
            raise ValueError(f"it holds a file {info.filename!r}")
        if kind not in (0, stat.S_IFREG) or info.is_dir() or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{info.filename} is no plain file")
        if info.compress_type not in _METHODS:
            raise ValueError(f"{info.filename} is compressed in another way")
    if sum(info.file_size for info in infos) > MAX_BYTES:
        raise ValueError(f"it holds more than {MAX_BYTES} bytes")
    return infos

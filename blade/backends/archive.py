# SPDX-License-Identifier: Apache-2.0
"""The payload of an engine as an archive of files, with who made it and a few facts.

data = Archive({"torch": torch.__version__}, {"orders": [None]}, {"model.so": code}).to_bytes()
archive = read(data, {"torch": torch.__version__}, "AOTInductor")     # BackendError: not for here
"""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blade.errors import BackendError

_HEAD = "engine.json"


@dataclass(frozen=True)
class Archive:
    """``stamp``: versions by name that have to be the same where it is loaded. ``facts``: JSON."""

    stamp: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        head = {"stamp": dict(self.stamp), "facts": dict(self.facts)}
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as zipped:
            for name, data in {_HEAD: json.dumps(head).encode(), **self.files}.items():
                # without the time of day: equal contents are equal bytes
                zipped.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        return made.getvalue()


def read(data: bytes, here: Mapping[str, str], who: str) -> Archive:
    """Raises ``BackendError`` if it is damaged, or ``who`` made it with other versions than ``here``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            files = {name: zipped.read(name) for name in zipped.namelist()}
        head = json.loads(files.pop(_HEAD))
        archive = Archive(head["stamp"], head["facts"], files)
    except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"what {who} compiled is damaged ({error}).") from error
    for name, version in here.items():
        if (made := archive.stamp.get(name)) != version:
            raise BackendError(
                f"{who} compiled it for {name} {made}, and this is {name} {version}: optimize the model again."
            )
    return archive

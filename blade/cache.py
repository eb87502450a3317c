# SPDX-License-Identifier: Apache-2.0
"""Compiled results on disk, by content: what was compiled once is not compiled again.

    cache = open_cache(config.cache)    # None if it is off
    cache.get("kernel", key)            # bytes, or None
    cache.put("kernel", key, data)

The folder is ``BLADE_CACHE_DIR``, by default ``~/.cache/blade``. A key is the SHA-256 of everything the
result depends on (``digest``), so an entry is never stale, only unused; the least recently used go when
there are too many. Entries are written under another name and renamed, and carry a checksum: processes
may share the folder, and what is damaged counts as missing. They are data, nothing of them is executed
on reading. Whoever may write to the folder decides what code runs here, as with any compiler's cache; so it
is made for its owner alone, and one that belongs to another user is not used.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30
KEEP = 0.75  # of the limit, when entries have to go
_MAGIC = b"blade-cache-1\n"
_SUM_BYTES = hashlib.sha256().digest_size


def open_cache(enabled: bool = True) -> Cache | None:
    """The cache of this process; ``None`` if it is off (``Config(cache=False)``) or has no place."""
    path = folder() if enabled else None
    return None if path is None else _open(path)


def folder() -> Path | None:
    """Where this process keeps compiled results, whether or not it exists; ``None``: nowhere."""
    if named := os.environ.get("BLADE_CACHE_DIR"):
        return Path(named)
    home = os.path.expanduser("~")
    return Path(home, ".cache", "blade") if os.path.isabs(home) else None


@functools.lru_cache(maxsize=8)
def _open(path: Path) -> Cache:
    return Cache(path)


def digest(parts: Iterable[str | bytes]) -> str:
    """A key: SHA-256 over ``parts`` and where each one ends, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


@functools.lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of blade itself: another version of its code makes other keys, released or not."""
    package = Path(__file__).resolve().parent
    sources = sorted(package.rglob("*.py"))
    native = [(p.name, p.stat()) for p in sorted(package.glob("_runtime*.so"))]
    return digest(
        [part for p in sources for part in (str(p.relative_to(package)), p.read_bytes())]
        + [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in native]
    )


@dataclass
class Cache:
    """A folder of entries, at most about ``limit`` bytes of them.

    Nothing here raises: where the disk says no, ``get`` finds nothing and ``put`` keeps nothing.
    """

    folder: Path
    limit: int = LIMIT_BYTES
    hits: int = 0
    misses: int = 0
    _written: int | None = field(default=None, repr=False)  # bytes since the last look through all

    def get(self, kind: str, key: str) -> bytes | None:
        """What was put under ``key``, if it is there and undamaged."""
        path = self._path(kind, key)
        try:
            content = path.read_bytes() if _is_own(self.folder) else None
        except OSError:
            content = None
        data = None if content is None else _checked(content)
        if content is not None and data is None:
            log.info("the cache entry %s is damaged and not used", path.name)
        if data is None:
            self.misses += 1
            return None
        self.hits += 1
        with suppress(OSError):
            os.utime(path)  # for the eviction: file systems rarely note reads by themselves
        return data

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``, in place of what is there."""
        path = self._path(kind, key)
        if not self._write(path, _MAGIC + hashlib.sha256(data).digest() + data):
            return
        # The first entry of a process looks what others left; then one look per tenth of the limit.
        if self._written is None or self._written + len(data) > self.limit // 10:
            self._written = 0
            self._evict()
        else:
            self._written += len(data)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / key

    def _write(self, path: Path, content: bytes) -> bool:
        name = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(self.folder):
                log.info("the cache folder %s belongs to another user and is not used", self.folder)
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError as error:
            log.info("nothing is kept in the cache folder %s: %s", self.folder, error)
            if name is not None:
                with suppress(OSError):
                    os.unlink(name)
            return False
        return True

    def _evict(self) -> None:
        """Remove the entries unused for longest until ``KEEP`` of the limit is left."""
        entries = []
        for path in self.folder.glob("*/*/*"):
            with suppress(OSError):  # another process evicts as well
                stat = path.stat()
                entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= self.limit:
            return
        for _, size, path in sorted(entries):
            if total <= self.limit * KEEP:
                break
            with suppress(OSError):
                path.unlink()
            total -= size


def _checked(content: bytes) -> bytes | None:
    """The data of an entry, ``None`` if it is not as it was written."""
    head = len(_MAGIC) + _SUM_BYTES
    data = content[head:]
    whole = (
        content.startswith(_MAGIC) and hashlib.sha256(data).digest() == content[len(_MAGIC) : head]
    )
    return data if whole else None


def _is_own(folder: Path) -> bool:
    return folder.stat().st_uid == os.geteuid()

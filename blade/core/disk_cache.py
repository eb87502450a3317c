# SPDX-License-Identifier: Apache-2.0
"""A disk cache of compiled results, addressed by content.

    cache = open_cache(config.cache)    # None if it is off
    cache.get("kernel", key)            # bytes, or None
    cache.put("kernel", key, data)

The folder is ``BLADE_CACHE_DIR``, by default ``~/.cache/blade``. A key is the SHA-256 of everything the
result depends on (``digest``), so an entry is never stale, only unused; the least recently used entries are
evicted at the limit. Entries are written under another name and renamed, and carry a checksum: processes may
share the folder, and damaged entries count as missing. Entries are data: reading them executes nothing. Write
access to the folder means control over the code that runs here, as with any compiler's cache: folders and
entries are made for their owner alone (0700, 0600), and those that others may write are not used
(``blade.core.private_files`` has the rules). ``untrusted`` tells this to the report of ``optimize``.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blade.core.private_files import (
    NotPrivate,
    folder_within,
    make_private,
    read_within,
    why_not_private,
    write_within,
)
from blade.core.reason import Code, Reason, Stage

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30
KEEP = 0.75  # of the limit, after an eviction
_MAGIC = b"blade-cache-1\n"
_SUM_BYTES = hashlib.sha256().digest_size


def open_cache(enabled: bool = True) -> DiskCache | None:
    """The cache of this process; ``None`` if it is off (``Config(cache=False)``) or has no folder."""
    path = folder() if enabled else None
    return None if path is None else _open(path)


def folder() -> Path | None:
    """The folder of compiled results, which may not exist yet; ``None`` if there is none."""
    if named := os.environ.get("BLADE_CACHE_DIR"):
        return Path(named)
    home = os.path.expanduser("~")
    return Path(home, ".cache", "blade") if os.path.isabs(home) else None


def untrusted(enabled: bool = True) -> tuple[Reason, ...]:
    """Why the cache, or entries requested since the last call, are not used."""
    cache = open_cache(enabled)
    if cache is None:
        return ()
    why = why_not_private(cache.folder)
    found = [why] if why else [cache.refused.pop(path) for path in list(cache.refused)]
    return tuple(
        Reason(Stage.CONVERT, Code.CACHE_UNTRUSTED, None, str(cache.folder), _NOT_USED + text)
        for text in found
    )


_NOT_USED = "What is kept on disk is not used, as others may have written it: "


@functools.lru_cache(maxsize=8)
def _open(path: Path) -> DiskCache:
    return DiskCache(path)


def digest(parts: Iterable[str | bytes]) -> str:
    """A key: hexadecimal SHA-256 over ``parts`` and the position where each ends."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


@functools.lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of blade's own code: any change of it, released or not, changes all keys."""
    package = Path(__file__).resolve().parent.parent
    sources = sorted(package.rglob("*.py"))
    native = [(p.name, p.stat()) for p in sorted(package.glob("_runtime*.so"))]
    return digest(
        [part for p in sources for part in (str(p.relative_to(package)), p.read_bytes())]
        + [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in native]
    )


@dataclass
class DiskCache:
    """A folder of entries, at most about ``limit`` bytes of them.

    No method raises: after a disk error ``get`` finds nothing and ``put`` stores nothing.
    """

    folder: Path
    limit: int = LIMIT_BYTES
    hits: int = 0
    misses: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # entries that others may write, and why
    _written: int | None = field(default=None, repr=False)  # bytes since the last scan

    def get(self, kind: str, key: str) -> bytes | None:
        """The data stored under ``key``, if it is present, undamaged and private."""
        content = self._read(kind, key)
        data = None if content is None else _checked(content)
        if content is not None and data is None:
            log.info("the cache entry %s is damaged and not used", key)
        if data is None:
            self.misses += 1
            return None
        self.hits += 1
        return data

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store ``data`` under ``key``, replacing an earlier entry."""
        if not self._write(kind, key, _MAGIC + hashlib.sha256(data).digest() + data):
            return
        # Scan the folder at a process's first entry, then once per tenth of the limit.
        if self._written is None or self._written + len(data) > self.limit // 10:
            self._written = 0
            self._evict()
        else:
            self._written += len(data)

    def _read(self, kind: str, key: str) -> bytes | None:
        if why_not_private(self.folder) is not None:
            return None
        try:
            with folder_within(self.folder, [kind, key[:2]]) as opened:
                content = read_within(opened, key)
                with suppress(OSError):  # for eviction: file systems rarely record reads
                    os.utime(key, dir_fd=opened, follow_symlinks=False)
                return content
        except OSError as error:
            self._note(kind, key, error)
            return None

    def _write(self, kind: str, key: str, content: bytes) -> bool:
        if why := why_not_private(self.folder):
            log.info("nothing is kept in the cache folder %s: %s", self.folder, why)
            return False
        try:
            make_private(self.folder)
            with folder_within(self.folder, [kind, key[:2]], make=True) as opened:
                write_within(opened, key, content)
        except OSError as error:
            log.info("nothing is kept in the cache folder %s: %s", self.folder, error)
            self._note(kind, key, error)
            return False
        return True

    def _note(self, kind: str, key: str, error: OSError) -> None:
        """Remember why an entry is refused, if others may have written it."""
        name = f"{kind}/{key[:2]}/{key}"
        if isinstance(error, NotPrivate):
            self.refused[name] = f"{name}: {error}"
        elif error.errno in (errno.ELOOP, errno.ENOTDIR):  # errors of O_NOFOLLOW
            self.refused[name] = f"{name} is a link, or not in a folder."

    def _evict(self) -> None:
        """Remove the least recently used entries until ``KEEP`` of the limit is left."""
        entries = []
        for path in self.folder.glob("*/*/*"):
            if path.parent.is_symlink() or path.parent.parent.is_symlink():
                continue  # it leads out of the folder
            with suppress(OSError):  # another process evicts as well
                found = path.lstat()
                entries.append((found.st_mtime, found.st_size, path))
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
    """The data of an entry; ``None`` if it is damaged."""
    head = len(_MAGIC) + _SUM_BYTES
    data = content[head:]
    whole = (
        content.startswith(_MAGIC) and hashlib.sha256(data).digest() == content[len(_MAGIC) : head]
    )
    return data if whole else None

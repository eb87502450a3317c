# SPDX-License-Identifier: Apache-2.0
"""A disk cache of compiled results, addressed by content.

    cache = open_cache(config.cache)    # None if it is off
    cache.get("kernel", key)            # bytes, or None
    cache.put("kernel", key, data)
    with cache.locked("decision", key, wait_s=60):
        ...                             # no other process does this for the key now

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
import fcntl
import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time

from blade.core.private_files import (
    NotPrivate,
    folder_within,
    make_private,
    open_lock_within,
    read_within,
    why_not_private,
    write_within,
)
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30  # unless BLADE_CACHE_LIMIT_GB says otherwise
KEEP = 0.75  # of the limit, after an eviction
LOCKS = "lock"  # the folder of locks
_POLL_S = 0.05
observers: list[Callable[[DiskCache, str, str], None]] = []
"""Called with the kind and key of every entry that this process finds or stores."""
_MAGIC = b"blade-cache-1\n"
_SUM_BYTES = hashlib.sha256().digest_size


def open_cache(enabled: bool = True, limit_gb: float | None = None) -> DiskCache | None:
    """The cache of this process; ``None`` if it is off (``Config(cache=False)``) or has no folder.

    ``limit_gb``: what it may take from now on, in GiB.
    """
    path = folder() if enabled else None
    if path is None:
        return None
    cache = _open(path)
    if limit_gb is not None:
        cache.limit = int(limit_gb * LIMIT_BYTES)
    return cache


def limit_bytes() -> int:
    """What ``BLADE_CACHE_LIMIT_GB`` says, in bytes; 1 GiB without it. Raises ``ConfigError`` for no number above 0."""
    text = os.environ.get("BLADE_CACHE_LIMIT_GB")
    if not text:
        return LIMIT_BYTES
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < math.inf:
        raise ConfigError(
            f"BLADE_CACHE_LIMIT_GB: a number of GiB above 0 is expected, such as 0.5, got {text!r}."
        )
    return int(limit * LIMIT_BYTES)


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
    return DiskCache(path, limit_bytes())


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
    native = [(p.name, p.stat()) for p in sorted(package.glob("libblade_runtime*.so"))]
    return digest(
        [part for p in sources for part in (str(p.relative_to(package)), p.read_bytes())]
        + [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in native]
    )


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its kind, its size, and when it was last used (seconds since the epoch)."""

    path: Path
    kind: str
    bytes: int
    used: float


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
        self._tell(kind, key)
        return data

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store ``data`` under ``key``, replacing an earlier entry."""
        if self._store(kind, key, data):
            self._tell(kind, key)

    def read_entry(self, kind: str, key: str) -> bytes | None:
        """An entry as it is on disk, for ``put_entry`` in another folder."""
        content = self._read(kind, key)
        return None if content is None or _checked(content) is None else content

    def put_entry(self, kind: str, key: str, content: bytes) -> bool:
        """Store an entry of another folder; ``False`` if it is damaged."""
        data = _checked(content)
        if data is not None:
            self._store(kind, key, data)
        return data is not None

    def _store(self, kind: str, key: str, data: bytes) -> bool:
        if not self._write(kind, key, _MAGIC + hashlib.sha256(data).digest() + data):
            return False
        # Scan the folder at a process's first entry, then once per tenth of the limit.
        if self._written is None or self._written + len(data) > self.limit // 10:
            self._written = 0
            self._evict()
        else:
            self._written += len(data)
        return True

    def _tell(self, kind: str, key: str) -> None:
        for observer in observers:
            observer(self, kind, key)

    @contextmanager
    def locked(self, kind: str, key: str, wait_s: float) -> Iterator[bool]:
        """Keep other threads and processes that ask for the same lock out; yield whether some were in.

        After ``wait_s`` seconds, and where the folder cannot be used, the block runs all the same. The lock of a
        process goes with it.
        """
        opened, waited = self._open_lock(kind, key), False
        try:
            end = monotonic() + wait_s
            while opened is not None and not _took(opened):
                waited = True
                if monotonic() > end:
                    break
                sleep(_POLL_S)
            yield waited
        finally:
            if opened is not None:
                fcntl.flock(opened, fcntl.LOCK_UN)  # children may have the descriptor
                os.close(opened)

    def entries(self) -> list[Entry]:
        """What is kept, those used last first."""
        return sorted(self._entries(), key=lambda one: -one.used)

    def clear(self, unused_s: float = 0.0) -> list[Entry]:
        """Remove what was not used in the last ``unused_s`` seconds; return what was removed."""
        end, gone = time() - unused_s, []
        for one in self._entries():
            if one.used <= end:
                with suppress(OSError):
                    one.path.unlink()
                    gone.append(one)
        return gone

    def _open_lock(self, kind: str, key: str) -> int | None:
        if why_not_private(self.folder) is not None:
            return None
        try:
            make_private(self.folder)
            with folder_within(self.folder, [LOCKS, kind], make=True) as opened:
                return open_lock_within(opened, key)
        except OSError:
            return None

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
        entries = sorted(self._entries(), key=lambda one: one.used)
        total = sum(one.bytes for one in entries)
        if total <= self.limit:
            return
        for one in entries:
            if total <= self.limit * KEEP:
                break
            with suppress(OSError):
                one.path.unlink()
            total -= one.bytes

    def _entries(self) -> Iterator[Entry]:
        for path in self.folder.glob("*/*/*"):
            if path.parent.is_symlink() or path.parent.parent.is_symlink():
                continue  # it leads out of the folder
            with suppress(OSError):  # another process evicts as well
                found = path.lstat()
                yield Entry(path, path.parent.parent.name, found.st_size, found.st_mtime)


def _took(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _checked(content: bytes) -> bytes | None:
    """The data of an entry; ``None`` if it is damaged."""
    head = len(_MAGIC) + _SUM_BYTES
    data = content[head:]
    whole = (
        content.startswith(_MAGIC) and hashlib.sha256(data).digest() == content[len(_MAGIC) : head]
    )
    return data if whole else None

# SPDX-License-Identifier: Apache-2.0
"""Our entries in ``torch.compiler.save_cache_artifacts`` and ``load_cache_artifacts``.

data, info = torch.compiler.save_cache_artifacts()   # info.blade_artifacts: the entries that this process used
torch.compiler.load_cache_artifacts(data)            # elsewhere, after import blade: they are in the cache

Entries carry the cache's checksum; damaged ones are left out. Loading artifacts means to trust them, as with
torch's own. Seen in torch 2.13.
"""

import logging
import re

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from blade.core.disk_cache import DiskCache, observers, open_cache

log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z_]+/[0-9a-f]{64}")


class BladeCacheArtifact(CacheArtifact):
    """An entry by its name, "kind/key". It is read from ``cache`` when artifacts are saved, not kept in memory."""

    def __init__(self, key: str, content: bytes, cache: DiskCache | None = None) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "_loaded", content)
        object.__setattr__(self, "_cache", cache)

    @property
    def content(self) -> bytes:
        """The entry as it is on disk; empty if it is no longer there."""
        cache: DiskCache | None = vars(self)["_cache"]
        if cache is None:
            loaded: bytes = vars(self)["_loaded"]
            return loaded
        kind, key = self.key.split("/")
        return cache.read_entry(kind, key) or b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BladeCacheArtifact) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def populate_cache(self) -> None:
        """Store the entry in this machine's cache."""
        cache = open_cache()
        if cache is None or not _NAME.fullmatch(self.key):
            return
        kind, key = self.key.split("/")
        if not cache.put_entry(kind, key, self.content):
            log.info("the cache artifact %s is damaged and not used", self.key)

    @staticmethod
    def type() -> str:
        return "blade"


def _record(cache: DiskCache, kind: str, key: str) -> None:
    artifact = BladeCacheArtifact(f"{kind}/{key}", b"", cache)
    if artifact not in CacheArtifactManager._seen_artifacts:
        CacheArtifactManager._new_cache_artifacts[artifact.type()].append(artifact)
        CacheArtifactManager._seen_artifacts.add(artifact)


CacheArtifactFactory.register(BladeCacheArtifact)
observers.append(_record)

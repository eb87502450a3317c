# SPDX-License-Identifier: Apache-2.0
"""Sections of the engine cache and of the decision cache, with one interface: look up, keep, switch off.

    found = DECISIONS.look_up(config, key, decode, WHOLE)     # None: not known
    DECISIONS.keep(config, key, data)
    with sections_off(ENGINES, DECISIONS):                    # nothing is looked up or kept, in any thread
        blade.optimize(model, inputs)

A key comes from ``fingerprint.make_key``. ``core.disk_cache`` checks that an entry is undamaged and that others
cannot have written it; an entry that ``decode`` rejects counts as missing.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.disk_cache import DiskCache, open_cache
from blade.core.reason import Reason, Stage

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """Entries of one kind."""

    kind: str  # their folder

    def is_on(self, config: Config) -> bool:
        """Whether anything can be found or kept."""
        return self._open(config) is not None

    def look_up(
        self, config: Config, key: str | None, decode: Callable[[bytes], T | None], subject: str
    ) -> T | None:
        """Return the decoded entry of ``key``; ``None`` if there is none, or ``decode`` rejects it."""
        cache = self._open(config)
        data = None if cache is None or key is None else cache.get(self.kind, key)
        if data is None:
            return None
        found = attempt(Stage.SELECT, None, subject, lambda: (decode(data),))
        if isinstance(found, Reason):
            log.info("%s: the cached %s is not used: %s", subject, self.kind, found.detail)
            return None
        return found[0]

    def keep(self, config: Config, key: str | None, data: bytes) -> None:
        """Store ``data`` under ``key``; without a key nothing is stored."""
        cache = self._open(config)
        if cache is not None and key is not None:
            cache.put(self.kind, key, data)

    @contextmanager
    def locked(self, config: Config, key: str | None, wait_s: float) -> Iterator[bool]:
        """Nobody else makes the entry of ``key`` meanwhile (``DiskCache.locked``); whether somebody did before."""
        cache = self._open(config)
        if cache is None or key is None:
            yield False
            return
        with cache.locked(self.kind, key, wait_s) as waited:
            yield waited

    def _open(self, config: Config) -> DiskCache | None:
        if self in _off:
            return None
        return open_cache(config.cache, config.cache_limit_gb)


# The engine cache: engines, and why a backend has none.
ENGINES = Section("cluster")
REFUSALS = Section("refused")
# The decision cache: choices, the graphs they were made from, and the sizes and dtypes of their values.
DECISIONS = Section("decision")
TRACES = Section("trace")
FACTS = Section("facts")

_off: list[Section] = []


@contextmanager
def sections_off(*sections: Section) -> Iterator[None]:
    """Neither read nor write these sections inside the block, whatever ``Config.cache`` says."""
    _off.extend(sections)
    try:
        yield
    finally:
        for section in sections:
            _off.remove(section)

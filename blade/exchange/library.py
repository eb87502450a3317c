# SPDX-License-Identifier: Apache-2.0
"""What backends share whose library reads a model and runs it: whether it is here, and its sessions.

LIBRARY = Library("openvino", "Core")
LIBRARY.why_not_loadable()                  # None, or a sentence with the fix
sessions = Sessions(constants, start)
sessions.at(threads)                        # start(threads), made once, over the weights as they are now
"""

import importlib
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

from blade.exchange.watch import Watch

Key = TypeVar("Key", bound=Hashable)
Session = TypeVar("Session")


@dataclass(frozen=True)
class Library:
    """``name`` is imported, only when it is asked for; ``entry`` is what of it has to be there.

    ``packages`` are the distributions that bring it, the usual one first; ``without`` are modules that are not
    imported along with it.
    """

    name: str
    entry: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()

    def installed(self) -> str:
        """The version of the first package that is there; raises ``PackageNotFoundError``."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        raise PackageNotFoundError(self.packages[0])

    def stamp(self) -> dict[str, str]:
        """What engines of it have to be loaded with; raises ``PackageNotFoundError``."""
        return {self.name: self.installed()}

    def load(self) -> ModuleType:
        """The library itself; raises what importing it raises."""
        modules: dict[str, Any] = sys.modules
        wanted = () if self.name in modules else self.without
        hidden = [name for name in wanted if name not in modules]
        modules.update(dict.fromkeys(hidden))  # of what is None there is nothing to import
        try:
            return importlib.import_module(self.name)
        finally:
            for name in hidden:
                modules.pop(name, None)

    def why_not_loadable(self) -> str | None:
        """``None`` where the library can be imported, else a sentence with the fix."""
        package = self.packages[0]
        try:
            getattr(self.load(), self.entry)
            self.installed()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed: pip install {package}"
        except (ImportError, OSError, AttributeError) as error:
            return (
                f"{self.name} is installed and cannot be loaded ({error}): "
                f"pip install --force-reinstall {package}"
            )
        return None


class Sessions(Generic[Key, Session]):
    """What ``start`` makes of a key (a number of threads, say): once each, for all threads that call.

    A session may have folded or packed weights, so all of them are made anew once a weight was written.
    """

    def __init__(self, constants: Sequence[torch.Tensor], start: Callable[[Key], Session]) -> None:
        self._constants = constants
        self._start = start
        self._lock = threading.Lock()
        self._made: dict[Key, Session] = {}
        self._written = Watch(constants)

    def at(self, key: Key) -> Session:
        """The session of ``key``; raises what ``start`` raises."""
        found = self._made.get(key)
        if found is not None and not self._written.since():
            return found
        with self._lock:
            if self._written.since():
                self._made = {}
                self._written = Watch(self._constants)
            if key not in self._made:
                self._made[key] = self._start(key)
            return self._made[key]

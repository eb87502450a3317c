# SPDX-License-Identifier: Apache-2.0
"""Helpers for backends whose library reads a model and runs it: its availability, and its sessions.

LIBRARY = OptionalLibrary("openvino", "Core")
LIBRARY.why_not_loadable()                  # None, or a sentence with the fix
sessions = LibrarySessions(constants, start)
sessions.at(threads)                        # start(threads), made once, over the weights as they are now
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

from blade.backends.shared.weight_versions import WeightVersions

Key = TypeVar("Key", bound=Hashable)
Session = TypeVar("Session")


@dataclass(frozen=True)
class OptionalLibrary:
    """The module ``name``, imported at first use; it must have the attribute ``entry``.

    ``packages``: the distributions that contain it, the usual one first. ``without``: modules that it must
    not import. ``environment``: variables that are set while it is imported, unless they are already.
    """

    name: str
    entry: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def installed(self) -> str:
        """The version of the first installed package; raises ``PackageNotFoundError``."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        raise PackageNotFoundError(self.packages[0])

    def stamp(self) -> dict[str, str]:
        """The versions that its engines must be loaded with; raises ``PackageNotFoundError``."""
        return {self.name: self.installed()}

    def load(self) -> ModuleType:
        """Import the library; raises what the import raises."""
        modules: dict[str, Any] = sys.modules
        wanted = () if self.name in modules else self.without
        hidden = [name for name in wanted if name not in modules]
        modules.update(dict.fromkeys(hidden))  # None in ``sys.modules`` makes an import fail
        added = {name: value for name, value in self.environment if name not in os.environ}
        os.environ.update(added)
        try:
            return importlib.import_module(self.name)
        finally:
            for name in hidden:
                modules.pop(name, None)
            for name in added:
                os.environ.pop(name, None)

    def why_not_loadable(self) -> str | None:
        """``None`` if the library can be imported, else a sentence with the fix."""
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


class LibrarySessions(Generic[Key, Session]):
    """One session per key (such as a number of threads), made by ``start`` and shared by all calling threads.

    Sessions may have folded or packed weights, so all are made anew once a weight was written.
    """

    def __init__(self, constants: Sequence[torch.Tensor], start: Callable[[Key], Session]) -> None:
        self._constants = constants
        self._start = start
        self._lock = threading.Lock()
        self._made: dict[Key, Session] = {}
        self._written = WeightVersions(constants)

    def at(self, key: Key) -> Session:
        """The session of ``key``; raises what ``start`` raises."""
        found = self._made.get(key)
        if found is not None and not self._written.since():
            return found
        with self._lock:
            if self._written.since():
                self._made = {}
                self._written = WeightVersions(self._constants)
            if key not in self._made:
                self._made[key] = self._start(key)
            return self._made[key]

# SPDX-License-Identifier: Apache-2.0
"""Puts drop-ins in place of those parts of a module or of a program that are worth it, while it is used.

    parts = PartSwapper({"unet": unet, "vae": vae}, config)
    parts.start()                  # what is called alone, such as vae.decoder, becomes a drop-in
    parts.split("unet")            # the UNet itself cannot be optimized: its layers

Which ones is measured (``PartFinder``). A part whose calls cannot be optimized is split in turn.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from torch import nn

from blade.config import Config
from blade.core.reason import Code, Reason, Stage
from blade.dropin.drop_in import DropIn, drop_in, state_of
from blade.dropin.part_finder import PartFinder
from blade.dropin.state import DropInState
from blade.dropin.watched import obstacle

CALLS = 300  # that are measured, at most: of modules that are no part of another call

_log = logging.getLogger(__name__)


class PartSwapper:
    """The parts of ``roots`` that are drop-ins, by name. A root may be a drop-in itself."""

    def __init__(self, roots: Mapping[str, nn.Module], config: Config, program: Any = None) -> None:
        self.drop_ins: dict[str, Any] = {}
        self._roots = [name for name in roots if name]
        self.reasons: list[Reason] = []
        self._config = config
        self._program = program  # the object whose attributes the roots are
        self._finder = PartFinder(roots, self._noted)
        self._refused: set[str] = set()
        self._lock = threading.RLock()

    def knows(self, name: str) -> bool:
        """Whether there is a module ``name``."""
        return name in self._finder.modules

    def known_roots(self) -> str:
        """The end of a sentence on a name that is not known."""
        return f"; the modules are {', '.join(self._roots)} and those inside" if self._roots else ""

    def start(self) -> None:
        """Measure what the program calls from now on, and swap parts in meanwhile."""
        self._finder.start()

    def split(self, name: str) -> Sequence[str]:
        """Put drop-ins in place of the parts of ``name`` that take most of its time; return their names."""
        names = [part for part in self._finder.below(name) if self.swap(part)]
        module = self._finder.modules[name]
        if names and isinstance(module, DropIn):
            state_of(module).is_split = True
        return names

    def swap(self, name: str) -> bool:
        """Put a drop-in in the place of the module ``name``; return whether there is one then."""
        with self._lock:
            return self._swap(name)

    def _swap(self, name: str) -> bool:
        module = self._finder.modules[name]
        if isinstance(module, DropIn) or name in self.drop_ins:
            return True
        found = obstacle(module)
        if found is not None:
            self._refuse(name, module, found)
            return False
        parent, _, child = name.rpartition(".")
        holder = self._program if name in self._roots else self._finder.modules[parent]
        made = drop_in(module, self._config, in_background=True)
        state_of(made).on_refused = partial(self.split, name)
        replace = partial(_put, holder, child, made)
        for state in self._states_above(name):
            replace = partial(state.replace_part, replace)
        replace()
        self._finder.replace(name, made)
        self.drop_ins[name] = made
        _log.info("%s is answered by a drop-in of its own", name)
        return True

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds; return whether nothing is being optimized for a part."""
        end = None if timeout is None else monotonic() + timeout
        waited: set[str] = set()
        while left := [name for name in tuple(self.drop_ins) if name not in waited]:
            for name in left:  # a part that is split meanwhile has parts of its own
                waited.add(name)
                rest = None if end is None else max(0.0, end - monotonic())
                if not state_of(self.drop_ins[name]).wait(rest):
                    return False
        return True

    def _states_above(self, name: str) -> list[DropInState]:
        """The states of the drop-ins that the module ``name`` is a part of."""
        places = name.split(".")
        above = [".".join(places[:count]) for count in range(len(places))]
        modules = [self._finder.modules[one] for one in above if one in self._finder.modules]
        return [state_of(one) for one in modules if isinstance(one, DropIn)]

    def _noted(self, finder: PartFinder) -> None:
        for name in finder.called_alone():
            if name not in self._refused:
                self.swap(name)
        if finder.alone >= CALLS:
            finder.stop()

    def _refuse(self, name: str, module: nn.Module, why: str) -> None:
        self._refused.add(name)
        detail = f"{name or type(module).__name__} stays as it is: {why}."
        self.reasons.append(
            Reason(Stage.CAPTURE, Code.MUTATES, None, type(module).__name__, detail)
        )


def _put(holder: Any, name: str, made: nn.Module) -> None:
    """Let the attribute ``name`` of ``holder``, and others that are the same module, be ``made``."""
    module = getattr(holder, name)
    setattr(holder, name, made)
    for other, value in list(vars(holder).items()):
        if value is module:
            setattr(holder, other, made)

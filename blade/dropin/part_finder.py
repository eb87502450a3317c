# SPDX-License-Identifier: Apache-2.0
"""Measures which modules a program calls by themselves, and which parts of a module take its time.

    with PartFinder({"unet": unet, "vae": vae}) as finder:
        pipe("a cat")
    finder.called_alone()              # ["unet", "vae.decoder"]: what is called outside of the others
    finder.below("unet")               # the layers of the UNet that take most of its time

Hooks that watches and copies do not see note the calls, of any thread.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from blade.core import torchscript
from blade.dropin.measuring_hook import put_hooks, remove_hooks

CALLS = 3  # of a module that is called alone, before it counts
SHARE = 0.05  # of the time of all that is called alone
SHARE_BELOW = 0.1  # of the time of a module: what all its parts of one class have to take
LEAST_S = 200e-6  # s per call; what is shorter gains nothing as a part of its own
MOST = 24  # parts of one module
REMEMBERED = 256  # the last calls of a module, whose durations are kept


class _Calls:
    """The calls of one module: how many, and their usual duration, which a stalled call does not change."""

    def __init__(self) -> None:
        self.count = 0
        self._durations: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self.count += 1
        self._durations.append(seconds)

    @property
    def usual(self) -> float:
        """The median duration of a call, in seconds."""
        return median(self._durations) if self._durations else 0.0

    @property
    def seconds(self) -> float:
        """What all calls take at their usual duration."""
        return self.usual * self.count


class PartFinder:
    """Counts and times the calls of ``roots`` and all their layers between ``start`` and ``stop``.

    Names are those of ``roots``, a dot, and those of ``named_modules``. After each call that is no part of another
    one ``noted`` is called, on the thread of that call.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], noted: Callable[["PartFinder"], None] | None = None
    ) -> None:
        self.modules: dict[str, nn.Module] = {}
        for name, root in roots.items():
            for inner, module in root.named_modules():
                self.modules.setdefault(f"{name}.{inner}".strip("."), module)
        self.alone = 0  # calls that are no part of another one
        self._names = {id(module): name for name, module in self.modules.items()}
        self._noted = noted
        self._calls: dict[str, _Calls] = defaultdict(_Calls)
        self._calls_alone: dict[str, _Calls] = defaultdict(_Calls)
        self._callers: dict[str, str] = {}
        self._running = threading.local()
        self._lock = threading.Lock()
        self._is_running = False
        self._on_cuda = any(p.is_cuda for root in roots.values() for p in root.parameters())

    def __enter__(self) -> "PartFinder":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Measure from now on."""
        put_hooks(self.modules.values(), self._enter, self._leave)
        self._is_running = True

    def stop(self) -> None:
        """Measure no more; what was measured stays."""
        self._is_running = False
        remove_hooks(self.modules.values())

    def replace(self, name: str, module: nn.Module) -> None:
        """``module`` is called in place of the one known as ``name``."""
        self.modules[name] = module
        self._names[id(module)] = name

    def called_alone(self) -> list[str]:
        """What was called alone ``CALLS`` times and more, and took its share of the time; the dearest first."""
        with self._lock:
            total = sum(calls.seconds for calls in self._calls_alone.values())
            dearest = sorted(self._calls_alone.items(), key=lambda item: -item[1].seconds)
            return [
                name
                for name, calls in dearest
                if calls.count >= CALLS
                and calls.seconds >= SHARE * total
                and calls.usual >= LEAST_S
            ]

    def below(self, name: str) -> list[str]:
        """The parts that ``name`` calls and that take most of its time, the dearest first."""
        with self._lock:
            parts = [one for one, caller in self._callers.items() if caller == name]
            by_class: dict[type, float] = defaultdict(float)
            for one in parts:
                by_class[type(self.modules[one])] += self._calls[one].seconds
            least = SHARE_BELOW * self._calls[name].seconds
            found = [
                one
                for one in parts
                if by_class[type(self.modules[one])] >= least and self._calls[one].usual >= LEAST_S
            ]
            return sorted(found, key=lambda one: -self._calls[one].seconds)[:MOST]

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not self._is_running or torchscript.is_tracing():
            return
        stack = self._stack()
        if not stack and self._on_cuda:
            torch.cuda.synchronize()
        stack.append((name, perf_counter()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        stack = self._stack()
        if name is None or not stack or stack[-1][0] != name:
            return
        if len(stack) == 1 and self._on_cuda:
            torch.cuda.synchronize()
        seconds = perf_counter() - stack.pop()[1]
        with self._lock:
            self._calls[name].add(seconds)
            if stack:
                self._callers[name] = stack[-1][0]
                return
            self._calls_alone[name].add(seconds)
            self.alone += 1
        if self._noted is not None:
            self._noted(self)

    def _stack(self) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] | None = getattr(self._running, "stack", None)
        if found is None:
            found = self._running.stack = []
        return found

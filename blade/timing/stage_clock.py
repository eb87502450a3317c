# SPDX-License-Identifier: Apache-2.0
"""Seconds per stage; the progress callback hears when each stage begins.

clock = StageClock()
captured = clock.timed("capture", capture)(model, inputs, config)
clock.seconds                                # {"capture": 0.8}
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

from blade.core.progress import announce

P = ParamSpec("P")
T = TypeVar("T")


class StageClock:
    """``seconds`` by stage, in order of first use; a stage that is entered again adds to its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        announce(name)
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def timed(self, name: str, fn: Callable[P, T]) -> Callable[P, T]:
        """Wrap ``fn`` as part of the stage ``name``."""

        @wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.stage(name):
                return fn(*args, **kwargs)

        return run

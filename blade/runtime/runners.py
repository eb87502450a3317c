# SPDX-License-Identifier: Apache-2.0
"""Lazy runners: a backend's runner is imported when its first engine runs.

A process may load a saved file with engines of any backend. ``import blade`` therefore registers the
runners of all backends in the registry without importing them.
"""

from importlib.metadata import EntryPoint
from typing import Any, cast

from blade.runtime.engine import LoadRunner, Runner, register_runner


def register_lazily(runner: EntryPoint, keeps_inputs: bool = False) -> None:
    """``register_runner`` for the backend ``runner.name``; its ``LoadRunner`` is imported at first use."""

    def load(*engine: Any) -> Runner:
        return cast(LoadRunner, runner.load())(*engine)

    register_runner(runner.name, load, keeps_inputs)

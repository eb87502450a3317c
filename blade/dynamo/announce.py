# SPDX-License-Identifier: Apache-2.0
"""Tell Dynamo of blade's backends, without importing Dynamo: that takes longer than all of blade.

An installed package is found by its entry points. This is for a process that imports ``blade`` from a
folder: as soon as somebody imports Dynamo's registry, the backends are registered in it.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

REGISTRY = "torch._dynamo.backends.registry"
BACKENDS = ("disc", "aot_disc")


def announce() -> None:
    """Register now if Dynamo is there, else when it comes. Twice is as good as once."""
    if REGISTRY in sys.modules:
        _register(sys.modules[REGISTRY])
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register(registry: ModuleType) -> None:
    for name in BACKENDS:
        registry.register_backend(_late(name), name=name)


def _late(name: str) -> Any:
    """The backend's function, which is imported when it is called."""

    def compiler(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("blade.dynamo"), name)(gm, example_inputs, **kwargs)

    compiler.__name__ = name
    return compiler


class _Waiting(MetaPathFinder):
    """Lets everybody else find the registry, and looks over their shoulder once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

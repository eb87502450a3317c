# SPDX-License-Identifier: Apache-2.0
"""The backends and their runners by name: one row each, imported at first use.

    backend = load("disc")              # BackendError if there is none of that name
    available("disc")                   # None, or a sentence on why it cannot work here

Other packages add theirs with entry points: the backend, a subclass of ``Backend``, in the group ``blade.backends``
(name = "module:Class"); the function that loads its engines in the group ``blade.runners`` (name = "module:function",
under the exact name that the engines carry). A script calls ``register`` and ``runtime.engine.register_runner``.
Loading a backend does not check whether it works here.
"""

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from blade.core.backend import Backend
from blade.errors import BackendError

ENTRY_POINTS = "blade.backends"
RUNNER_ENTRY_POINTS = "blade.runners"


class Row(NamedTuple):
    """A built-in backend: ``backend`` is "module:Class".

    ``runner`` is the "module:function" that loads its engines; it never writes to their inputs. ``None``: the engines
    are native code.
    """

    backend: str
    runner: str | None = None


# In the order of trial.
_BUILT_IN = {
    "disc": Row("blade.backends.disc.backend:DiscBackend"),
    "quant": Row("blade.backends.quant.backend:QuantBackend"),
    "onnxruntime": Row(
        "blade.backends.onnxruntime.backend:OnnxRuntimeBackend",
        "blade.backends.onnxruntime.session:load",
    ),
    "openvino": Row(
        "blade.backends.openvino.backend:OpenVinoBackend",
        "blade.backends.openvino.session:load",
    ),
    "tensorrt": Row(
        "blade.backends.tensorrt.backend:TensorRTBackend",
        "blade.backends.tensorrt.runner:load",
    ),
    "inductor": Row(
        "blade.backends.inductor.backend:InductorBackend",
        "blade.backends.inductor.run:load",
    ),
    "tvm": Row(
        "blade.backends.tvm.backend:TvmBackend",
        "blade.backends.tvm.run:load",
    ),
}
_NODE_RUNNERS = {"onnx_node": "blade.backends.onnxruntime.node:load"}
"""Runners of engines that no backend makes: nodes of imported models."""
_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """All known backends, the built-in ones first."""
    return tuple(dict.fromkeys([*_BUILT_IN, *_entry_points(), *_registered]))


def register(backend: Backend) -> None:
    """Add ``backend`` (its ``name`` is lower-cased), in place of an earlier one of that name.

    Raises ``BackendError`` for anything but an instance of a subclass of ``Backend``.
    """
    _registered[_checked(backend).name.lower()] = backend


def unregister(name: str) -> None:
    """Undo ``register``; ``KeyError`` if there was none."""
    del _registered[name.lower()]


def is_registered(name: str) -> bool:
    """Whether ``register`` added this backend, so that other processes do not know it."""
    return name.lower() in _registered


def load(name: str) -> Backend:
    """The backend called ``name`` in any case; ``BackendError`` if unknown, not importable or no ``Backend``."""
    key = name.lower()
    if key in _registered:
        return _registered[key]
    point = _find(key)
    if point is None:
        near = difflib.get_close_matches(key, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BackendError(f"there is no backend {name!r}: {hint}Known are: {', '.join(names())}")
    try:
        return _instance(point)
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"backend {key!r} cannot be imported from {point.value}: {error}"
        ) from error
    except TypeError as error:  # an abstract class
        raise BackendError(f"backend {key!r} cannot be made by {point.value}(): {error}") from error


def available(name: str) -> str | None:
    """``None`` if backend ``name`` works in this process, else a sentence on why not."""
    try:
        return load(name).why_unavailable()
    except BackendError as error:
        return str(error)


def register_runners() -> None:
    """Make the runners of all rows and entry points known to this process, without importing them."""
    from blade.runtime.runners import register_lazily  # raises if the runtime is not built

    for point in entry_points(group=RUNNER_ENTRY_POINTS):
        if point.name not in _BUILT_IN:
            register_lazily(point)
    runners = {name: row.runner for name, row in _BUILT_IN.items() if row.runner is not None}
    for name, runner in {**runners, **_NODE_RUNNERS}.items():
        register_lazily(EntryPoint(name, runner, RUNNER_ENTRY_POINTS), keeps_inputs=True)


def _checked(backend: object) -> Backend:
    if isinstance(backend, Backend):
        return backend
    base = f"{Backend.__module__}.{Backend.__qualname__}"
    raise BackendError(f"{backend!r} is no backend: subclass {base}, and pass an instance of that.")


def _find(key: str) -> EntryPoint | None:
    if key in _BUILT_IN:
        return EntryPoint(key, _BUILT_IN[key].backend, ENTRY_POINTS)
    return _entry_points().get(key)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name.lower(): point for point in entry_points(group=ENTRY_POINTS)}


@cache
def _instance(point: EntryPoint) -> Backend:
    return _checked(point.load()())

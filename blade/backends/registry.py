# SPDX-License-Identifier: Apache-2.0
"""The backends by name; one line each, imported when first asked for.

    backend = load("disc")              # BackendError if there is none of that name
    available("disc")                   # None, or a sentence why it cannot work here

Other packages add theirs with an entry point in the group ``blade.backends`` (name = "module:Class"),
or at run time with ``register``. Loading does not ask whether the backend works here.
"""

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from blade.backends.base import Backend
from blade.errors import BackendError

ENTRY_POINTS = "blade.backends"

# In the order in which they are tried.
_BUILT_IN = {
    "disc": "blade.backends.disc.backend:DiscBackend",
    "quant": "blade.backends.quant.backend:QuantBackend",
    "onnxruntime": "blade.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "openvino": "blade.backends.openvino.backend:OpenVinoBackend",
    "tensorrt": "blade.backends.tensorrt.backend:TensorRTBackend",
    "inductor": "blade.backends.inductor.backend:InductorBackend",
    "tvm": "blade.backends.tvm.backend:TvmBackend",
}
_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """All known backends, the built-in ones first."""
    return tuple(dict.fromkeys([*_BUILT_IN, *_entry_points(), *_registered]))


def register(backend: Backend) -> None:
    """Add ``backend`` (its ``name`` is lower-cased), in place of an earlier one of that name."""
    _registered[backend.name.lower()] = backend


def unregister(name: str) -> None:
    """Undo ``register``; ``KeyError`` if there was none."""
    del _registered[name.lower()]


def is_registered(name: str) -> bool:
    """Whether ``register`` brought this backend, so that another process does not know it."""
    return name.lower() in _registered


def load(name: str) -> Backend:
    """The backend called ``name`` in any case; ``BackendError`` if unknown or not importable."""
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


def available(name: str) -> str | None:
    """``None`` if backend ``name`` works in this process, else a sentence why not."""
    try:
        return load(name).why_unavailable()
    except BackendError as error:
        return str(error)


def _find(key: str) -> EntryPoint | None:
    if key in _BUILT_IN:
        return EntryPoint(key, _BUILT_IN[key], ENTRY_POINTS)
    return _entry_points().get(key)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name.lower(): point for point in entry_points(group=ENTRY_POINTS)}


@cache
def _instance(point: EntryPoint) -> Backend:
    backend: Backend = point.load()()
    return backend

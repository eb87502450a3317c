# SPDX-License-Identifier: Apache-2.0
"""The installed TensorRT: ``tensorrt`` (10 or later) or TensorRT-RTX, under one name.

    library = find_library()          # imports it; BackendError with the fix if there is none
    library.stamp                     # "tensorrt_rtx 1.7.1.116": the version that engines need
    library.trt.Builder(library.logger)

Nothing is imported before ``find_library`` is called. Both have the same Python API; differences are detected
on the module itself, never derived from its version.
"""

import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from blade.errors import BackendError

log = logging.getLogger(__name__)

OLDEST = 10  # major version of tensorrt: strongly typed networks, addresses by name
# (module, whether it is TensorRT-RTX); the first that is installed is used.
MODULES = (("tensorrt", False), ("tensorrt_rtx", True), ("tensorrt_rtx_bindings", True))
INSTALL = (
    "install tensorrt (any NVIDIA GPU) or TensorRT-RTX (RTX GPUs): "
    "pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings."
)
SHOWN = 3  # errors of the library in one sentence
_LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.DEBUG,
    "INFO": logging.DEBUG,
    "VERBOSE": logging.DEBUG,
}


@dataclass(frozen=True)
class TensorRTLibrary:
    """An imported TensorRT. ``stamp``: its name and version; an engine runs with no other."""

    trt: Any
    is_rtx: bool
    version: str
    logger: Any
    _heard: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    @property
    def stamp(self) -> str:
        return f"{'tensorrt_rtx' if self.is_rtx else 'tensorrt'} {self.version}"

    def flag(self, group: str, name: str) -> Any | None:
        """A flag such as ``trt.BuilderFlag.STRIP_PLAN``; ``None`` if this version lacks it."""
        return getattr(getattr(self.trt, group, None), name, None)

    def said(self, what: str, errors: Sequence[str]) -> str:
        """A sentence on ``what`` went wrong, with the library's own words."""
        words = list(dict.fromkeys(errors))[:SHOWN]
        return f"{self.stamp} {what}: {' '.join(words) or 'it does not say why'}"

    @contextmanager
    def errors(self) -> Iterator[list[str]]:
        """The errors that the library reports within the block, in this thread."""
        before = getattr(self._heard, "texts", None)
        texts: list[str] = []
        self._heard.texts = texts
        try:
            yield texts
        finally:
            self._heard.texts = before

    def hear(self, severity: str, text: str) -> None:
        """Receive a message of ``logger``: errors go to an active ``errors`` block, others to the log."""
        texts: list[str] | None = getattr(self._heard, "texts", None)
        level = _LEVELS.get(severity, logging.DEBUG)
        if level == logging.ERROR and texts is not None:
            texts.append(text)
            level = logging.DEBUG
        log.log(level, "%s", text)


def installed() -> str | None:
    """The name of the module to import, without importing it; ``None`` if there is none."""
    return next((name for name, _ in MODULES if _is_there(name)), None)


@cache
def find_library() -> TensorRTLibrary:
    """The TensorRT of this process. Raises ``BackendError`` that says what to install."""
    name = installed()
    if name is None:
        raise BackendError(f"TensorRT is not installed: {INSTALL}")
    try:
        trt = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(
            f"{name} is installed but cannot be imported ({error}): {INSTALL}"
        ) from error
    return wrap(trt, dict(MODULES)[name])


def wrap(trt: Any, is_rtx: bool) -> TensorRTLibrary:
    """``trt`` as a ``TensorRTLibrary``. Raises ``BackendError`` if it is older than blade supports."""
    version = str(trt.__version__)
    if not is_rtx and int(version.split(".")[0]) < OLDEST:
        raise BackendError(
            f"tensorrt {version} is installed; blade needs {OLDEST} or later (strongly typed "
            "networks): pip install --upgrade tensorrt."
        )

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            library.hear(getattr(severity, "name", str(severity)), text)

    library = TensorRTLibrary(trt, is_rtx, version, Logger())
    return library


def why_no_device() -> str | None:
    """``None`` if torch has a CUDA device for TensorRT, else a sentence."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def why_not_device(library: TensorRTLibrary) -> str | None:
    """``None`` if this library has code for the current CUDA device.

    TensorRT-RTX builds anywhere and runs on RTX GPUs only: it lists their compute capabilities.
    """
    major, minor = torch.cuda.get_device_capability()
    if not library.is_rtx or library.flag("ComputeCapability", f"SM{major}{minor}") is not None:
        return None
    name = torch.cuda.get_device_name()
    return (
        f"{library.stamp} does not run on {name} (compute capability {major}.{minor}): install "
        "tensorrt for it."
    )


def _is_there(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None  # a plain folder of that name has none
    except (ImportError, ValueError):  # a parent that cannot be imported, a module without a spec
        return False

# SPDX-License-Identifier: Apache-2.0
"""The exceptions a user of blade can see.

A user's mistake raises ``ConfigError`` or ``InputError``: the text names the argument, the value and the
allowed values. ``BackendError`` is raised only for a backend that the user named and that cannot serve; a
failure of an automatically chosen backend is a ``Reason`` in the report. ``EngineError`` says that one has
damaged the caller's data. ``BladeWarning`` is the category of all warnings that require action although the call
succeeded.
"""

import logging
import os
import sys
import warnings
from contextvars import ContextVar
from functools import cache
from pathlib import Path

_PACKAGES = ("blade", "torch")


class BladeError(Exception):
    """Base class of every exception that blade raises on purpose."""


class ConfigError(BladeError, ValueError):
    """A ``Config`` field has an unknown name, a wrong type or a value out of range."""


class InputError(BladeError, ValueError):
    """The model or the sample inputs given to ``optimize`` cannot be used."""


class BackendError(BladeError, RuntimeError):
    """A backend that the user named is missing or cannot be used here."""


class EngineError(BladeError, RuntimeError):
    """An engine wrote to the caller's tensors, which it must only read: it is a defect of the engine."""


class Refused(BladeError):
    """Raised inside a stage to decline a node, cluster or candidate; ``attempt`` turns it into its ``Reason``.

    ``code`` is a ``blade.core.reason.Code``; ``args[0]`` is the detail, a full sentence.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class BladeWarning(UserWarning):
    """The call succeeded, with a restriction the user should know of; the text says what to do."""


_only_logged: ContextVar[bool] = ContextVar("_only_logged", default=False)


def log_warnings() -> None:
    """Make ``warn_user`` only log from now on in this thread, which no line of the user's stands behind."""
    _only_logged.set(True)


def warn_user(text: str) -> None:
    """Issue a ``BladeWarning`` that points at the user's line: the innermost frame outside blade and torch."""
    if _only_logged.get():
        _log.info("%s", text)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, BladeWarning, frame.f_code.co_filename, frame.f_lineno, registry=seen
    )


_log = logging.getLogger(__name__)


def is_internal(file: str) -> bool:
    """Whether ``file`` belongs to blade, to torch or to the import system."""
    return file.startswith(("<frozen importlib", *_folders()))


@cache
def _folders() -> tuple[str, ...]:
    """The folders of these packages, as prefixes of file names."""
    found = [sys.modules[name].__file__ for name in _PACKAGES if name in sys.modules]
    return tuple(f"{Path(file).parent}{os.sep}" for file in found if file is not None)

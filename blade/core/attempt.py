# SPDX-License-Identifier: Apache-2.0
"""Run something that may fail, and get its result or the ``Reason`` why there is none.

    engine = attempt(Stage.CONVERT, "disc", "cluster_0", lambda: backend.convert(c, config), strict)

This is the only place in blade that catches ``Exception``: all exceptions of third-party code while a
candidate is built or tried pass through here, so that none is lost and no other is hidden.
"""

import logging
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError, EngineError, InputError, Refused

log = logging.getLogger(__name__)
T = TypeVar("T")


def attempt(
    stage: Stage,
    backend: str | None,
    subject: str,
    fn: Callable[[], T],
    strict: bool = False,
    code: Code = Code.CONVERSION_FAILED,
) -> T | Reason:
    """``fn()``, or a ``Reason`` if it raised: ``code``, or the code of a ``Refused``.

    ``strict`` re-raises (``Config(strict=True)``), except ``Refused``, which is a decision and no failure.
    ``ConfigError``, ``InputError`` and ``EngineError`` are for the user and always pass.
    """
    try:
        return fn()
    except Refused as refusal:
        return Reason(stage, Code(refusal.code), backend, subject, str(refusal))
    except (ConfigError, InputError, EngineError):
        raise
    except Exception as error:
        if strict:
            raise
        log.debug("%s: %s failed on %s", stage.value, backend, subject, exc_info=True)
        kind, text = type(error).__name__, str(error).strip()
        first = text.splitlines()[0] if text else "no message"
        # without a backend, torch or the model may be at fault as well as blade
        who = "" if backend is None else f"{backend} raised "
        detail = f"{who}{kind} in the stage {stage.value!r}: {first}"
        return Reason(stage, code, backend, subject, detail, _where(error, error.__traceback__))


def _where(error: Exception, tb: TracebackType | None) -> str:
    """The error and its innermost location, without folder names of the build machine."""
    frames = traceback.extract_tb(tb)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if not frames:
        return text
    last = frames[-1]
    file = last.filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{text}\n  at {file}:{last.lineno} in {last.name}"

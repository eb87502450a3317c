# SPDX-License-Identifier: Apache-2.0
"""Exceptions inside a runner that are not failures of the engine.

    with interrupts_noted():
        outputs = runner(inputs)     # KeyboardInterrupt reaches the caller of the module

These are ``KeyboardInterrupt``, ``SystemExit`` and all others that are no ``Exception``, and exceptions
raised by handlers of ``signal.signal``: a time limit set by an alarm may expire inside a runner.
"""

import functools
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, TracebackType
from typing import Any

import torch


def interrupts_noted() -> AbstractContextManager[None]:
    """A context manager that reports interrupts that leave the block to the C++ runtime."""
    return _Noted()


def is_interrupt(error: BaseException) -> bool:
    """Is ``error`` no ``Exception``, or did a signal handler raise it?"""
    if not isinstance(error, Exception):
        return True
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not frames.isdisjoint(_handlers())


class _Noted(AbstractContextManager[None]):
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and is_interrupt(error):
            torch.ops.blade.note_interrupt()


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and (code := _code_of(handler)) is not None:
            yield code


def _code_of(handler: Callable[..., Any]) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None

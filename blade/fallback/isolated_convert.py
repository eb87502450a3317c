# SPDX-License-Identifier: Apache-2.0
"""Convert in another process, with a deadline and a memory limit: a crash there becomes a Reason here.

    found = convert_isolated(backend, cluster, config)     # an engine, or the Reason against it

An exception there is CONVERSION_FAILED, death by a signal CONVERSION_CRASHED, and exceeding
``Config.conversion_deadline_s`` CONVERSION_TIMEOUT. The engine is loaded and run there before this process
sees it. The call always returns by the deadline; a malformed answer is CONVERSION_FAILED. Processes are
started once and reused (they run ``convert_worker``).
"""

import atexit
import itertools
import logging
import os
import pickle
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TypeVar

import torch

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, Refused
from blade.fallback import convert_worker
from blade.fallback.cluster_codec import constants_of, encode_cluster, save_tensors
from blade.fallback.convert_worker import Answer, ConvertRequest, EngineParts
from blade.process.child import SpawnedProcess, describe_status
from blade.process.frames import BrokenFrame, Frames, wait_for
from blade.runtime.engine import make_engine
from blade.verification.derived_inputs import left_out

log = logging.getLogger(__name__)
T = TypeVar("T")

START_S = 120.0  # seconds, to import torch from a cold disk on a busy machine
OUTPUT_CHARACTERS = 2000  # characters shown of the output of a process that died
_FOLDERS = re.compile(r'File "[^"\n]*/')  # folders of this machine are not shown

Failure = tuple[Code, str, str]  # code, what happened, what the process wrote


def convert_isolated(
    backend: Backend, cluster: Cluster, config: Config
) -> torch.ScriptObject | Reason:
    """Return the engine that ``backend.convert`` makes in another process, over the constants of ``cluster``.

    The backend's runner has to be registered in this process too (importing its module does that). Under
    ``config.strict`` raises ``BackendError`` instead of returning a ``Reason``, except for a refusal by the
    backend; raises ``ConfigError`` or ``InputError`` if the backend does.
    """
    found = attempt(
        Stage.CONVERT,
        backend.name,
        cluster.name,
        lambda: _convert(backend, cluster, config),
        config.strict,
    )
    return raise_if_strict(found, config)


def raise_if_strict(found: T | Reason, config: Config) -> T | Reason:
    """Return ``found``; under ``config.strict`` raise ``BackendError`` unless it is a refusal."""
    if isinstance(found, Reason) and config.strict and found.error is not None:
        raise BackendError(f"{found.detail}\n{found.error}")
    return found


def close_workers() -> None:
    """End the idle processes; the next conversion starts a new one."""
    while _idle:
        _idle.pop().close()


def end_conversions() -> None:
    """End all processes at exit, converting ones included: their threads are not joined."""
    with _lock:
        busy = list(_busy)
    for worker in busy:
        worker.kill()
    close_workers()


@contextmanager
def keep_workers(count: int) -> Iterator[None]:
    """Let this many processes stay idle inside the block; one after it."""
    global _room
    with _lock:
        _room += count - 1
    try:
        yield
    finally:
        with _lock:
            _room -= count - 1
            surplus = [_idle.pop() for _ in range(len(_idle) - _room)]
        for worker in surplus:
            worker.close()


def _convert(backend: Backend, cluster: Cluster, config: Config) -> torch.ScriptObject | Reason:
    request = partial(
        ConvertRequest,
        backend=_pickled(backend),
        backend_name=backend.name,
        # passes over the captured graph have run, and are often functions that cannot be pickled
        config=config.evolve(customize_jit_passes=()),
        cluster=encode_cluster(cluster),
        threads=torch.get_num_threads(),
        left_out=left_out(cluster.gm),
    )
    with tempfile.TemporaryFile(
        prefix="blade-"
    ) as tensors:  # nameless: it disappears with the processes
        save_tensors(cluster, tensors)
        tensors.flush()
        with _borrow() as worker:
            answer = worker.ask(request, tensors.fileno(), config.conversion_deadline_s)
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, EngineParts):
        return _assemble(answer, backend, cluster)
    reason = answer if isinstance(answer, Reason) else _reason(backend, *answer)
    return replace(reason, subject=cluster.name)


def _pickled(backend: Backend) -> bytes:
    try:
        return pickle.dumps(backend)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Refused(
            Code.CONVERSION_FAILED,
            f"backend {backend.name!r} cannot be sent to the process that converts ({error}): define "
            "it at the top level of a module, or let it say in_process = True.",
        ) from error


def _reason(backend: Backend, code: Code, what: str, output: str) -> Reason:
    return Reason(Stage.CONVERT, code, backend.name, "", f"{backend.name} {what}", output)


def _assemble(parts: EngineParts, backend: Backend, cluster: Cluster) -> torch.ScriptObject:
    own = constants_of(cluster)
    held = [own[c] if isinstance(c, str) else pickle.loads(c) for c in parts.constants]
    return make_engine(cluster.name, backend.name, parts.program, parts.payload, held, parts.limits)


class ConvertWorker(SpawnedProcess):
    """A server process whose children convert."""

    def __init__(self) -> None:
        notices, says = os.pipe()
        self._notices = open(notices, "rb", buffering=0)  # noqa: SIM115 - open as long as the process
        self._said = Frames(notices)
        with open(says, "wb", buffering=0):
            folder = tempfile.mkdtemp(prefix="blade-")
            super().__init__(convert_worker.main, says, folder, folder=folder, pass_fds=[says])
        self._numbers = itertools.count()
        self._child_is_ready = False
        self.usable = True

    def ask(
        self, request: Callable[..., ConvertRequest], tensors: int, deadline_s: float
    ) -> Answer | Failure:
        """Return the answer to ``request(number=...)`` with the file ``tensors``, or the child's failure."""
        self.usable = False
        self._await_ready()
        written = self.written_bytes()
        number, end = next(self._numbers), monotonic() + deadline_s
        try:
            self.post(request(number=number), tensors)
            found = self._answer(number, end)
        except TimeoutError:
            what = f"did not convert within Config.conversion_deadline_s={deadline_s:g} s."
            return self._failure(Code.CONVERSION_TIMEOUT, what, written)
        except BrokenFrame as error:
            what = f"spoiled the answer of the process that converts: {error}."
            return self._failure(Code.CONVERSION_FAILED, what, written)
        self.usable = (
            not self.frames.is_within
        )  # else the next answer would begin with the rest of this one
        if not isinstance(found, int):
            return found
        how = describe_status(found) + " and no answer" * (found >= 0)
        what = f"ended the process that converts, {how}."
        return Code.CONVERSION_CRASHED, what, self._output_since(written)

    def close(self) -> None:
        """End the server, its child and all processes that the child has started, and remove their files."""
        self.usable = False
        super().close()
        self._notices.close()

    def _await_ready(self) -> None:
        """Wait for a child; also register one that died while idle."""
        end = monotonic() + START_S
        try:
            while self._notice() is not None or not self._child_is_ready:
                if not self._child_is_ready:
                    wait_for([self._notices.fileno()], end)
        except (TimeoutError, BrokenFrame) as error:
            self.close()
            raise BackendError(
                f"no process to convert in came up within {START_S:g} s: {error}"
            ) from error

    def _answer(self, number: int, end: float) -> Answer | int:
        """Return the child's answer; its exit status, or minus the signal, if it ended before that."""
        while True:
            if (answer := self._received(number)) is not None:
                self._child_is_ready = isinstance(answer, EngineParts)
                return answer
            kind, value = self._notice() or ("", 0)
            if kind == "ended":  # it has sent all of its answer by now
                answer = self._received(number)
                return value if answer is None else answer
            if not kind:
                wait_for([self.connection.fileno(), self._notices.fileno()], end)

    def _notice(self) -> tuple[str, int] | None:
        """Return the server's next notice about its child, if there is one."""
        if (frame := self._taken(self._said)) is None:
            return None
        kind, value = pickle.loads(frame)
        self._child_is_ready = kind == "ready"
        return kind, value

    def _received(self, number: int) -> Answer | None:
        """Return the answer to the request ``number``, if it has arrived."""
        while (frame := self._taken(self.frames)) is not None:
            sent = attempt(Stage.CONVERT, None, "an answer", partial(pickle.loads, frame))
            if not isinstance(sent, tuple):
                raise BrokenFrame(f"bytes came that are no answer: {frame[:16]!r}")
            if sent[0] == number:
                answer: Answer = sent[1]
                return answer
        return None

    def _taken(self, frames: Frames) -> bytes | None:
        try:
            return frames.take()
        except EOFError as error:
            text = self._output_since(0)
            self.close()
            raise BackendError(f"the process to convert in does not run: {text}") from error

    def _failure(self, code: Code, what: str, since: int) -> Failure:
        output = self._output_since(since)
        self.close()
        return code, what, output

    def _output_since(self, position: int) -> str:
        # faulthandler ends with a long list of modules
        text = self.written(position).partition("\nExtension modules:")[0].strip()
        return _FOLDERS.sub('File "', text)[:OUTPUT_CHARACTERS] or "It wrote nothing."


_idle: list[ConvertWorker] = []
_busy: set[ConvertWorker] = set()
_room = 1  # number of idle workers to keep
_lock = threading.Lock()


@contextmanager
def _borrow() -> Iterator[ConvertWorker]:
    """Yield a worker for one conversion; keep it for later if there is room."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is not None and not worker.is_alive():
        worker.close()
        worker = None
    if worker is None:
        worker = ConvertWorker()
    with _lock:
        _busy.add(worker)
    try:
        yield worker
    finally:
        with _lock:
            _busy.discard(worker)
            keep = worker.usable and len(_idle) < _room
            if keep:
                _idle.append(worker)
        if not keep:
            worker.close()


atexit.register(end_conversions)

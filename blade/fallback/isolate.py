# SPDX-License-Identifier: Apache-2.0
"""Convert in another process, with a deadline and a memory limit: a crash there is a Reason here.

    found = convert_isolated(backend, cluster, config)     # an engine, or the Reason against it

An exception there is CONVERSION_FAILED, death by a signal CONVERSION_CRASHED, and what takes longer
than ``Config.conversion_deadline_s`` CONVERSION_TIMEOUT. The engine is loaded and run there before
this process sees it. Processes are started once and reused (``worker``). They are not children of
``multiprocessing``, which would run the user's main script again.
"""

import atexit
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch

from blade.backends.base import Backend, Cluster
from blade.config import Config
from blade.errors import BackendError, Refused
from blade.fallback.attempt import attempt
from blade.fallback.parcel import constants, pack, save_tensors
from blade.fallback.worker import Answer, Parts, Request
from blade.reason import Code, Reason, Stage
from blade.runtime.engine import make_engine

log = logging.getLogger(__name__)
T = TypeVar("T")

START_S = 120.0  # importing torch from a cold disk, on a busy machine
OUTPUT_CHARACTERS = 2000  # of what a process wrote before it died
_FOLDERS = re.compile(r'File "[^"\n]*/')  # those of this machine are nobody's business


def convert_isolated(
    backend: Backend, cluster: Cluster, config: Config
) -> torch.ScriptObject | Reason:
    """The engine ``backend.convert`` makes elsewhere, over the very constants of ``cluster``.

    The backend's runner has to be registered in this process too (importing its module does that).
    Raises ``BackendError`` instead of returning a ``Reason`` under ``config.strict``, except where the
    backend decided to refuse; and ``ConfigError`` or ``InputError`` if the backend does.
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
    """``found``; raises ``BackendError`` under ``config.strict`` if it is an accident, not a refusal."""
    if isinstance(found, Reason) and config.strict and found.error is not None:
        raise BackendError(f"{found.detail}\n{found.error}")
    return found


def close_workers() -> None:
    """End the processes that wait for work; the next conversion starts a new one."""
    while _idle:
        _idle.pop().close()


def end_conversions() -> None:
    """Done at exit: also those that convert, for threads that nobody will wait for."""
    with _lock:
        busy = list(_busy)
    for worker in busy:
        worker.kill()
    close_workers()


@contextmanager
def several_workers(count: int) -> Iterator[None]:
    """As many processes may wait for work inside the block; one does after it."""
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
    with tempfile.TemporaryDirectory(prefix="blade-") as folder:
        path = Path(folder) / "tensors.pt"
        save_tensors(cluster, path)
        request = Request(
            backend=_pickled(backend),
            backend_name=backend.name,
            # passes over the captured graph have run, and are often functions that cannot be sent
            config=config.evolve(customize_jit_passes=()),
            cluster=pack(cluster),
            tensors=path,
            threads=torch.get_num_threads(),
        )
        with _borrow() as worker:
            answer = worker.ask(pickle.dumps(request), config.conversion_deadline_s)
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, Parts):
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


def _assemble(parts: Parts, backend: Backend, cluster: Cluster) -> torch.ScriptObject:
    own = constants(cluster)
    held = [own[c] if isinstance(c, str) else pickle.loads(c) for c in parts.constants]
    return make_engine(cluster.name, backend.name, parts.program, parts.payload, held, parts.limits)


Failure = tuple[Code, str, str]  # code, what happened, what the process wrote


class _Worker:
    """The parent's end of one server process."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # not "-m": the child has to find blade where this process found it
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from blade.fallback.worker import main; main({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._child_is_ready = False
        self.usable = True

    def ask(self, request: bytes, deadline_s: float) -> Answer | Failure:
        """The child's answer, or what became of the child."""
        self.usable = False
        self._await_ready()
        written = os.fstat(self._output.fileno()).st_size
        self._connection.send_bytes(request)
        if not self._connection.poll(deadline_s):
            self.close()
            what = f"did not convert within Config.conversion_deadline_s={deadline_s:g} s."
            return Code.CONVERSION_TIMEOUT, what, self._written_since(written)
        kind, value = self._receive()
        self.usable = True
        self._child_is_ready = kind == "engine"
        if kind != "ended":
            answer: Answer = value
            return answer
        what = f"ended the process that converts, {_how(value)}."
        return Code.CONVERSION_CRASHED, what, self._written_since(written)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the server, its child and whatever the child has started."""
        self.usable = False
        self._connection.close()
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """From any thread: whoever waits for an answer sees the connection end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _await_ready(self) -> None:
        """Also takes note of a child that died while nobody asked it anything."""
        while not self._child_is_ready or self._connection.poll(0):
            if not self._connection.poll(START_S):
                self.close()
                raise BackendError(f"no process to convert in came up within {START_S:g} s")
            kind, _ = self._receive()
            self._child_is_ready = kind == "ready"

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            self.close()
            text = self._written_since(0)
            raise BackendError(f"the process to convert in does not run: {text}") from error
        return kind, value

    def _written_since(self, position: int) -> str:
        self._output.seek(position)
        text = self._output.read().decode(errors="replace")
        # faulthandler ends with a long list of modules
        text = _FOLDERS.sub('File "', text).partition("\nExtension modules:")[0].strip()
        return text[:OUTPUT_CHARACTERS] or "It wrote nothing."


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status} and no answer"
    return f"by signal {-status} ({signal.Signals(-status).name})"


_idle: list[_Worker] = []
_busy: set[_Worker] = set()
_room = 1  # for idle ones
_lock = threading.Lock()


@contextmanager
def _borrow() -> Iterator[_Worker]:
    """A worker for one conversion; kept for later if there is room."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None or not worker.is_alive():
        worker = _Worker()
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


def _forget_workers() -> None:
    """In a forked copy of this process, they belong to the original."""
    _idle.clear()
    _busy.clear()


atexit.register(end_conversions)
os.register_at_fork(after_in_child=_forget_workers)

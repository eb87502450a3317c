# SPDX-License-Identifier: Apache-2.0
"""Try something first in a forked child of this process, where it may crash or hang.

    with ForkedRunner(run) as runner:      # run(item) is tried
        runner.post(3)                     # forks, and returns at once
        runner.result().why                # None: it returned or raised; else how it ended the child

A fork needs no copy of weights. A new thread makes it: a thread that has used OpenMP would wait in the child
for its team of threads, which does not exist there. The child checks its heap after each item, so that most
memory corruption shows at the item that caused it. It runs the items in the order posted, and is forked again
after a crash, up to ``CRASHES`` times. After a hang nothing more is tried: a lock that another thread held at
the fork is never released in the child.

A forked process cannot use tensors on a GPU; ``can_try`` is false for them.
"""

import ctypes
import faulthandler
import gc
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch

from blade.core.attempt import attempt
from blade.core.reason import Stage
from blade.process.child import ChildProcess, NoAnswer
from blade.process.frames import Frames, write_frame
from blade.process.tensor_pickle import dump

DEADLINE_S = 30.0  # per item, as long as none has come back
LATER_S, GROWTH = 5.0, 100.0  # then these seconds, or this factor to the longest that one took
CRASHES = 4  # after which nothing more is tried


@dataclass(frozen=True)
class TrialOutcome:
    """``why``: how an item ended the process. ``answers``: its result, if requested and picklable. ``took_s``: its
    seconds."""

    why: str | None = None
    answers: tuple[Any, ...] = ()
    took_s: float = field(default=0.0, compare=False)


class ForkedRunner:
    """Tries items with ``run``; one of them may take ``slack_s`` longer than ``DEADLINE_S``, or than what follows from
    those that came back: at an unusual size a model may compute for minutes.

    ``answers``: whether results of ``run`` are sent back; the child keeps each until it is requested. ``usual_s``: the
    seconds that an item takes, if they are known.
    """

    def __init__(
        self,
        run: Callable[[Any], object],
        slack_s: float = 0.0,
        answers: bool = False,
        usual_s: float | None = None,
    ) -> None:
        self._run = run if answers else partial(_drop, run)
        self._deadline_s = DEADLINE_S + slack_s
        self._longest_s = usual_s
        self._waiting: deque[bytes] = deque()
        self._child: ForkedProcess | None = None
        self._crashes = 0
        self._gave_up = ""

    def post(self, *items: Any) -> None:
        """Queue ``items``, small picklable values, behind earlier ones."""
        if self._gave_up:
            return
        data = [pickle.dumps(item) for item in items]
        self._waiting.extend(data)
        if self._child is None:
            self._child = ForkedProcess(self._run, self._deadline_s)
            data = list(self._waiting)
        self._child.give(data)

    def result(self) -> TrialOutcome:
        """The outcome of the earliest item whose outcome was not returned yet."""
        if self._gave_up:
            return TrialOutcome(self._gave_up)
        if self._child is None:
            self.post()
        assert self._child is not None
        found = self._child.take(self._patience_s())
        self._waiting.popleft()
        if (why := found.why) is not None:
            is_hang = self._child.is_alive()
            self.close()
            self._crashes += 1
            if is_hang or self._crashes >= CRASHES:
                self._gave_up = f"was not tried, as what was tried before {why}"
        else:
            self._longest_s = max(self._longest_s or 0.0, found.took_s)
        return found

    def _patience_s(self) -> float:
        if self._longest_s is None:
            return self._deadline_s
        return min(self._deadline_s, max(LATER_S, GROWTH * self._longest_s))

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> "ForkedRunner":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ForkedProcess(ChildProcess):
    """The forked process, as its parent sees it."""

    def __init__(self, run: Callable[[Any], object], deadline_s: float) -> None:
        with ExitStack() as owned:
            mine, theirs = map(owned.enter_context, socket.socketpair())
            pid = _fork(partial(_serve, run, theirs, deadline_s))
            theirs.close()
            owned.callback(_reap, pid)
            super().__init__(mine, pid, owned.pop_all())

    def give(self, items: Iterable[bytes]) -> None:
        with suppress(OSError):  # ``result`` says why
            for item in items:
                write_frame(self.connection.fileno(), item, monotonic() + 1.0)

    def take(self, deadline_s: float) -> TrialOutcome:
        try:
            found: TrialOutcome = pickle.loads(self.receive(deadline_s))
        except NoAnswer as error:
            return TrialOutcome(str(error))
        return found


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # in another fork it is no child
        os.waitpid(pid, 0)


def _fork(serve: Callable[[], None]) -> int:
    """Fork a process whose new thread runs ``serve``, which never returns."""
    found: list[int | OSError] = []
    set_modes = _modes()

    def fork() -> None:
        with warnings.catch_warnings():
            about = "This process .* is multi-threaded"
            warnings.filterwarnings("ignore", about, DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:  # no memory, or too many processes
                found.append(error)
                return
        if pid == 0:
            set_modes()
            serve()
        found.append(pid)

    thread = threading.Thread(target=fork, name="blade-fork")
    thread.start()
    thread.join()
    [pid] = found
    if isinstance(pid, OSError):
        raise pid
    return pid


def _modes() -> Callable[[], None]:
    """A function that copies this thread's autocast state to another thread."""
    known = [
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    ]
    keeps = torch.is_autocast_cache_enabled()

    def set_modes() -> None:
        for device, enabled, dtype in known:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(keeps)

    return set_modes


def _serve(run: Callable[[Any], object], connection: socket.socket, deadline_s: float) -> None:
    """The main function of the forked process; it never returns, and skips its parent's exit hooks."""
    try:
        _settle()
        frames = Frames(connection.fileno())
        libc = ctypes.CDLL(None)
        while True:
            item = pickle.loads(frames.wait())
            signal.setitimer(signal.ITIMER_REAL, 2 * deadline_s)  # if no parent ends it
            frame = _trial_outcome(run, item)
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)  # walks the heap, and aborts if it is corrupt
            write_frame(connection.fileno(), frame)
    except (EOFError, OSError):
        os._exit(0)  # the parent has closed
    finally:
        os._exit(1)


def _trial_outcome(run: Callable[[Any], object], item: Any) -> bytes:
    """The outcome to send back. The results of ``run`` are freed here, where that may crash as well."""

    begin = monotonic()

    def send() -> bytes:
        with torch.no_grad():
            answer = run(item)
            return dump(TrialOutcome(answers=(answer,), took_s=monotonic() - begin))

    frame = attempt(Stage.VERIFY, None, "an input", send)  # may well raise
    if isinstance(frame, bytes):
        return frame
    return pickle.dumps(TrialOutcome(took_s=monotonic() - begin))


def _drop(run: Callable[[Any], object], item: Any) -> None:
    run(item)


def _settle() -> None:
    gc.disable()
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = open(nowhere, "w")  # noqa: SIM115 - lives as long as the process

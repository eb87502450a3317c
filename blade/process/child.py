# SPDX-License-Identifier: Apache-2.0
"""A child process: start it, send it requests with a deadline, end it.

    with SpawnedProcess(llvm.serve, standalone=True) as child:
        child.post(kernels)                      # returns at once, however large the request is
        objects = child.answer(deadline_s)       # NoAnswer says why there is none

    def serve(requests: Requests) -> None:       # in the child
        for kernels in requests:
            requests.answer([compile_kernel(*kernel) for kernel in kernels])

A spawned process runs in a session of its own, so that a terminal's interrupt reaches this process only. Its
requests end when this process closes it or dies. In a fork of this process every child counts as closed: only
the process that started it can use it. ``multiprocessing`` is not used, as it would run the user's main
script again.
"""

import inspect
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from blade.process import frames
from blade.process.frames import BrokenFrame, Frames, is_ready, wait_for

Self = TypeVar("Self", bound="ChildProcess")
MIB = 1 << 20
CLOSING_S = 10.0  # from the end of a process's stream to its exit


class NoAnswer(Exception):
    """A process did not answer; it "ended the process by signal 11 (SIGSEGV)". ``output``: the text it wrote."""

    output = ""


class ChildProcess:
    """A forked or spawned child process that sends frames over ``connection``.

    Closing or dropping it kills it, and with ``has_group`` its process group, then closes ``owned``.
    """

    def __init__(
        self, connection: socket.socket, pid: int, owned: ExitStack, has_group: bool = False
    ) -> None:
        connection.setblocking(False)
        self.connection, self.pid = connection, pid
        self.frames = Frames(connection.fileno())
        # The connection alone does not show its end: a process forked meanwhile may hold the other end too.
        self._ends = os.pidfd_open(pid)
        self._kill = _in_owner(_kill, pid, self._ends, has_group)
        owned.callback(os.close, self._ends)
        owned.callback(self._kill)
        self._finish = weakref.finalize(self, owned.close)
        _children.add(self)

    def is_alive(self) -> bool:
        """Whether it runs; ``False`` in a fork of the process that started it."""
        return self._finish.alive and not is_ready(self._ends)

    def receive(self, deadline_s: float) -> bytes:
        """The next frame. Raises ``NoAnswer``; after that the process can only be closed."""
        end, fd = monotonic() + deadline_s, self.connection.fileno()
        try:
            while (frame := self.frames.take()) is None:
                if self._ends in wait_for([fd, self._ends], end) and not is_ready(fd):
                    raise EOFError
            return frame
        except TimeoutError as error:
            raise NoAnswer(f"did not come back within {deadline_s:g} s") from error
        except EOFError as error:
            raise NoAnswer(f"ended the process {describe_status(self._status())}") from error
        except BrokenFrame as error:
            raise NoAnswer(f"wrote into a stream of others ({error})") from error

    def kill(self) -> None:
        """Kill it, from any thread; a thread that waits for its answer sees it end."""
        if self._finish.alive:
            self._kill()

    def close(self) -> None:
        """End it, whatever it is doing, and release everything it owns."""
        self._finish()

    def _status(self) -> int:
        """The exit status, without reaping; a process that has only closed its end is killed."""
        with suppress(TimeoutError):
            wait_for([self._ends], monotonic() + CLOSING_S)
        self.kill()
        with suppress(ChildProcessError):  # already reaped if SIGCHLD is ignored
            ended = os.waitid(os.P_PIDFD, self._ends, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return 0

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SpawnedProcess(ChildProcess):
    """A new Python process that runs ``main(requests, *arguments)``; the arguments must have a ``repr``.

    ``standalone``: ``main`` is loaded from its file, without blade or torch, which takes 0.1 s; the file may
    not import them either. ``idle_s``: seconds without a request after which the requests end.
    ``environment`` is added to this process's. ``folder`` is its ``TMPDIR``, which is removed when the
    process is closed.
    """

    def __init__(
        self,
        main: Callable[..., None],
        *arguments: object,
        standalone: bool = False,
        idle_s: float = inf,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        added = dict(environment or {})
        with ExitStack() as owned:
            mine, theirs = map(owned.enter_context, socket.socketpair())
            self._output = owned.enter_context(tempfile.TemporaryFile())
            if folder is not None:
                added["TMPDIR"] = folder
                owned.callback(_in_owner(shutil.rmtree, folder, True))
            requests = f'Requests({theirs.fileno()}, float("{idle_s}"))'
            program = _program(main, requests, arguments, standalone)
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno(), *pass_fds],
                env={**os.environ, **added},
                start_new_session=True,
            )
            theirs.close()
            owned.callback(process.wait)
            super().__init__(mine, process.pid, owned.pop_all(), has_group=True)
        self._finish.atexit = False  # its requests end with this process

    def post(self, request: object, *files: int) -> None:
        """Send ``request`` and open files. The request is sent as a file too, so that sending never waits."""
        with open(os.memfd_create("blade-request"), "w+b") as data:
            pickle.dump(request, data)
            data.seek(0)
            with suppress(BrokenPipeError, ConnectionResetError):  # ``answer`` will say why
                socket.send_fds(self.connection, [b"\0"], [data.fileno(), *files])

    def answer(self, deadline_s: float) -> Any:
        """The next answer. Raises ``NoAnswer``, as ``receive`` does."""
        try:
            return pickle.loads(self.receive(deadline_s))
        except NoAnswer as error:
            error.output = self.written()
            raise

    def written(self, since: int = 0) -> str:
        """Its output to stdout and stderr from the byte ``since`` on; available until it is closed."""
        data = os.pread(self._output.fileno(), self.written_bytes() - since, since)
        return data.decode(errors="replace").strip()

    def written_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size


def _program(main: Callable[..., None], requests: str, arguments: object, standalone: bool) -> str:
    """The child's code: ``-m`` would import blade; running the file would put its folder in ``sys.path``."""
    name, file = main.__module__, inspect.getfile(main)
    return f"""
import sys
sys.path[:] = {sys.path!r}
from importlib import import_module, util
def load(name, file):
    spec = util.spec_from_file_location(name, file)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
requests = load("frames", {frames.__file__!r}).{requests}
module = load({name!r}, {file!r}) if {standalone} else import_module({name!r})
module.{main.__name__}(requests, *{arguments!r})
"""


def _in_owner(do: Callable[..., object], *args: object) -> Callable[[], None]:
    """A function that calls ``do(*args)``, but does nothing in a fork of this process."""
    owner = os.getpid()

    def guarded() -> None:
        if os.getpid() == owner:
            do(*args)

    return guarded


def _kill(pid: int, ends: int, has_group: bool) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(ends, signal.SIGKILL)
    with suppress(ProcessLookupError):
        if has_group:
            os.killpg(pid, signal.SIGKILL)


_children: "weakref.WeakSet[ChildProcess]" = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close connections in a fork: with a copy open, a child would not see that this process closed its end."""
    for child in list(_children):
        child.close()


os.register_at_fork(after_in_child=_close_in_fork)


def describe_status(status: int) -> str:
    """An exit status, or minus a signal, in words."""
    if status >= 0:
        return f"with exit status {status}"
    return f"by signal {-status} ({signal.Signals(-status).name})"


def limit_memory(mib: int | None) -> None:
    """Let this process map at most ``mib`` MiB more than it has now; ``None`` lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard if mib is None else _mapped() + mib * MIB
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()

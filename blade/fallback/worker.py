# SPDX-License-Identifier: Apache-2.0
"""The process in which backends of others convert; ``isolate`` is its other end.

A server imports torch and blade once, then forks a child, which converts until something goes wrong;
the next child is forked in milliseconds. Messages are pickles, each sent by whoever knows first:

    server: ("ready", pid)    ("ended", exit status or -signal)
    child:  ("engine", Parts)    ("failure", Reason or the exception that is the user's to see)
"""

import faulthandler
import os
import pickle
import resource
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from blade.backends.base import Backend, Cluster
from blade.config import Config
from blade.errors import ConfigError, InputError
from blade.fallback.attempt import attempt
from blade.fallback.lossy import budget_of
from blade.fallback.parcel import constants, unpack
from blade.fallback.verify import verify
from blade.reason import Reason, Stage

GRACE_S = 10  # beyond the deadline, a child whose parent has gone ends by itself
MIB = 1 << 20


@dataclass(frozen=True)
class Request:
    """One conversion. ``backend`` is pickled apart: that it cannot be loaded is the backend's failure."""

    backend: bytes
    backend_name: str
    config: Config
    cluster: bytes
    tensors: Path
    threads: int


@dataclass(frozen=True)
class Parts:
    """An engine between processes; a constant that the cluster has is sent by name."""

    program: str
    payload: bytes
    limits: dict[str, int]
    constants: list[str | bytes] = field(default_factory=list)


Answer = Parts | Reason | ConfigError | InputError


def main(descriptor: int) -> None:
    """The server: until the other end of the connection is closed."""
    connection = Connection(descriptor)
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        while True:
            pid = os.fork()
            if pid == 0:
                _work(connection)
            _send(connection, "ready", pid)
            _, status = os.waitpid(pid, 0)
            _send(connection, "ended", os.waitstatus_to_exitcode(status))
    except (BrokenPipeError, ConnectionResetError):
        pass  # nobody listens any more


def _work(connection: Connection) -> None:
    """The child: until the first failure, which may have left anything behind."""
    try:
        while True:
            request = pickle.loads(connection.recv_bytes())
            answer = _answer(request)
            works = isinstance(answer, Parts)
            _send(connection, "engine" if works else "failure", answer)
            if not works:
                break
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody asks any more
    os._exit(0)  # without the exit hooks of the server


def _send(connection: Connection, kind: str, value: object) -> None:
    connection.send_bytes(pickle.dumps((kind, value)))


def _answer(request: Request) -> Answer:
    deadline = request.config.conversion_deadline_s
    # ends the process whatever it is doing, also native code
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline + GRACE_S)
    torch.set_num_threads(request.threads)
    result: Answer
    try:
        result = attempt(
            Stage.CONVERT, request.backend_name, "the cluster", lambda: _convert(request)
        )
    except (ConfigError, InputError) as error:
        result = error  # the user's to see, in the user's process
    signal.setitimer(signal.ITIMER_REAL, 0)
    _limit_memory(None)
    return result


def _convert(request: Request) -> Parts:
    cluster = unpack(request.cluster, request.tensors)
    backend: Backend = pickle.loads(request.backend)
    _limit_memory(request.config.conversion_memory_mb)
    engine: Any = backend.convert(cluster, request.config)
    # Loaded and run here first, on all that it will be verified on: what crashes, crashes here. The
    # verdict is the caller's to make, against the TorchScript original.
    budget = budget_of(backend, request.config)
    verify(cluster, engine, cluster.gm, backend.name, budget=budget)
    return _take_apart(engine, cluster)


def _limit_memory(mib: int | None) -> None:
    """From now on this process may map ``mib`` MiB more than it has; ``None`` lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard if mib is None else _mapped() + mib * MIB
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _take_apart(engine: Any, cluster: Cluster) -> Parts:
    _, words, numbers, tensors = engine._get_method("__getstate__")()
    limits = {name: value for name, value in numbers.items() if name != "checksum"}
    names = {_identity(tensor): name for name, tensor in constants(cluster).items()}
    payload, *rest = tensors
    held = [names.get(_identity(tensor)) or _to_bytes(tensor) for tensor in rest]
    return Parts(words[2], _raw(payload), limits, held)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _raw(payload: torch.Tensor) -> bytes:
    return bytes(payload.numpy())


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return pickle.dumps(tensor.detach().clone())

# SPDX-License-Identifier: Apache-2.0
"""The process in which third-party backends convert; ``isolated_convert`` is its other end.

A server imports torch and blade once, then forks a child, which converts until its first failure; the next
child is forked in milliseconds. Server and child have a stream each, so that a child that dies in the middle
of its answer does not corrupt the server's notices:

    server: ("ready", pid)    ("ended", exit status or -signal)
    child:  (number of the request, Parts, Reason or the exception that is the user's to see)

A request comes with an open file of tensors. The file has no name, so that it disappears however the
processes end. Files that a conversion makes are in the server's folder, which it empties after each child;
when the other process ends, the server ends its child and removes the folder.
"""

import faulthandler
import os
import pickle
import resource
import select
import shutil
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.reason import Reason, Stage
from blade.errors import ConfigError, InputError
from blade.fallback.cluster_codec import constants_of, decode_cluster
from blade.process.child import limit_memory
from blade.process.frames import Requests, write_frame
from blade.process.tensor_pickle import dump
from blade.verification.reduced_precision import budget_of
from blade.verification.verify import verify

GRACE_S = 10  # seconds past the deadline after which a child whose parent is gone ends itself


@dataclass(frozen=True)
class ConvertRequest:
    """One conversion. ``backend`` is pickled separately: a failure to load it is the backend's failure.

    ``number`` tells the answer from one to an earlier request.
    """

    number: int
    backend: bytes
    backend_name: str
    config: Config
    cluster: bytes
    threads: int
    left_out: frozenset[str]  # names of verification cases


@dataclass(frozen=True)
class EngineParts:
    """An engine between processes; constants that the cluster has are sent by name."""

    program: str
    payload: bytes
    limits: dict[str, int]
    constants: list[str | bytes] = field(default_factory=list)


Answer = EngineParts | Reason | ConfigError | InputError


def main(requests: Requests, notices: int, folder: str) -> None:
    """Run the server until the other end of ``requests`` is closed. Notices go to a pipe of their own."""
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = os.getpid()
    try:
        while True:
            pid = os.fork()
            if pid == 0:
                _work(requests)
            _notify(notices, "ready", pid)
            status = _wait(pid, requests.connection)
            _empty(folder)
            _notify(notices, "ended", status)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the other end is closed
    finally:
        if os.getpid() == server:  # a child may leave this way, too
            shutil.rmtree(folder, ignore_errors=True)


def _wait(pid: int, connection: socket.socket) -> int:
    """Wait for the child and return how it ended; end it if the requesting process is gone."""
    ends = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(connection, 0)  # reports when the other end is closed
    try:
        if ends not in (fd for fd, _ in poll.poll()):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(ends)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _empty(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, mode=0o700, exist_ok=True)


def _work(requests: Requests) -> None:
    """Run the child until its first failure, after which its state is unknown."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the other process is gone
        for request in requests:
            [tensors] = requests.files
            answer = _answer(request, tensors)
            requests.answer((request.number, answer))
            if not isinstance(answer, EngineParts):
                break
    os._exit(0)  # without the exit hooks of the server


def _notify(fd: int, *message: object) -> None:
    write_frame(fd, pickle.dumps(message))


def _answer(request: ConvertRequest, tensors: int) -> Answer:
    """Answer ``request``; ``tensors`` is the open file, which is closed in here."""
    deadline = request.config.conversion_deadline_s
    # ends the process whatever it is doing, native code included
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline + GRACE_S)
    torch.set_num_threads(request.threads)
    result: Answer
    try:
        result = attempt(
            Stage.CONVERT,
            request.backend_name,
            "the cluster",
            lambda: _convert(request, tensors),
        )
    except (ConfigError, InputError) as error:
        result = error  # raised in the user's process
    signal.setitimer(signal.ITIMER_REAL, 0)
    limit_memory(None)
    return result


def _convert(request: ConvertRequest, tensors: int) -> EngineParts:
    try:
        cluster = decode_cluster(request.cluster, Path(f"/proc/self/fd/{tensors}"))
    finally:
        os.close(tensors)
    backend: Backend = pickle.loads(request.backend)
    limit_memory(request.config.conversion_memory_mb)
    engine: Any = backend.convert(cluster, request.config)
    # Load and run the engine here first, on all inputs of its verification, so that a crash happens here. The
    # caller verifies it against the TorchScript original.
    budget = budget_of(backend, request.config)
    verify(cluster, engine, cluster.gm, backend.name, budget=budget, left_out=request.left_out)
    return _take_apart(engine, cluster)


def _take_apart(engine: Any, cluster: Cluster) -> EngineParts:
    _, words, numbers, tensors = engine._get_method("__getstate__")()
    limits = {name: value for name, value in numbers.items() if name != "checksum"}
    names = {_identity(tensor): name for name, tensor in constants_of(cluster).items()}
    payload, *rest = tensors
    held = [names.get(_identity(tensor)) or _to_bytes(tensor) for tensor in rest]
    return EngineParts(words[2], _raw(payload), limits, held)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _raw(payload: torch.Tensor) -> bytes:
    return bytes(payload.numpy())


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return dump(tensor.detach().clone())

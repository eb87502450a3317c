# SPDX-License-Identifier: Apache-2.0
"""The process that compiles for GPUs (``cubin.serve_compilations``), started ahead of the first request.

    warm_up(target)                                 # returns at once; imports Triton meanwhile
    results = compile_in_forks(units, target)       # per unit the result of cubin.pack, or a sentence why not

It serves one process and any target, one request at a time, and ends with that process or after being idle for a while.
"""

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from blade.backends.disc.gpu.compile import cubin
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.target.gpu import GpuTarget
from blade.process.child import NoAnswer, SpawnedProcess
from blade.process.overlap import run_while_waiting

IDLE_S = 30.0
DEADLINE_S = 1800.0  # per request; a unit takes about a second
MAX_PROCESSES = 16
Result = tuple[bytes, int, int] | str

_lock = threading.Lock()
_server: SpawnedProcess | None = None


def warm_up(target: GpuTarget) -> None:
    """Start the process, as compilations for ``target`` will follow."""
    with _lock:
        _started(target)


def compile_in_forks(units: Sequence[TritonUnit], target: GpuTarget) -> list[Result]:
    """Compile in one process per processor, the longest units first."""
    order = sorted(range(len(units)), key=lambda k: -len(units[k].text))
    fields = [asdict(units[k]) for k in order]
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    # results are stored in blade's cache, not in Triton's
    with tempfile.TemporaryDirectory(prefix="blade-") as folder, _lock:
        found = _ask(_started(target), (fields, target.triton, target.shared, folder, processes))
    if isinstance(found, str):
        return [found] * len(units)
    results = dict(zip(order, found, strict=True))
    return [results[k] for k in range(len(units))]


def _ask(child: SpawnedProcess, request: object) -> list[Result] | str:
    """The answer, or the process's output when it ended."""
    with ExitStack() as failed:
        failed.callback(child.close)  # if interrupted, its next answer would be to this request
        try:
            child.post(request)
            run_while_waiting()
            found: list[Result] = child.answer(DEADLINE_S)
        except NoAnswer as error:
            return error.output or f"it {error}"
        failed.pop_all()
    return found


def _started(target: GpuTarget) -> SpawnedProcess:
    global _server
    if _server is None or not _server.is_alive():
        if _server is not None:
            _server.close()
        # Triton's interpreter may be on here
        _server = SpawnedProcess(
            cubin.serve_compilations,
            target.triton,
            standalone=True,
            idle_s=IDLE_S,
            environment={"TRITON_INTERPRET": "0"},
        )
    return _server

# SPDX-License-Identifier: Apache-2.0
"""The process that compiles for GPUs (``cubin.serve``): started before there is anything to compile.

    expect(target)                                  # returns at once; imports Triton meanwhile
    results = compile_in_forks(units, target)       # of each unit what cubin.pack makes, or a sentence why not

It serves one process of ours, one request at a time, and ends with it, or when it has been idle for a while.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from blade.backends.disc.gpu import cubin
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.unit import Unit
from blade.meanwhile import do_meanwhile

IDLE_S = 30.0
MAX_PROCESSES = 16
Result = tuple[bytes, int, int] | str

# not "-m": that would import blade, and with it torch
_PROGRAM = """
import importlib.util, sys
sys.path[:] = {path!r}
spec = importlib.util.spec_from_file_location("cubin", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.serve({arch}, {idle_s})
"""

_lock = threading.Lock()
_server: "_Server | None" = None


class _Server:
    """A process for one architecture. It is in a session of its own: what interrupts this one is not for it."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.owner = os.getpid()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        program = _PROGRAM.format(path=sys.path, file=cubin.__file__, arch=arch, idle_s=IDLE_S)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "TRITON_INTERPRET": "0"},
            start_new_session=True,
        )

    def serves(self, arch: int) -> bool:
        """Not after it was idle for too long, nor in a fork of the process that started it."""
        mine = self.owner == os.getpid() and self.arch == arch
        return mine and self.process.poll() is None

    def ask(self, request: Any) -> list[Result] | str:
        """The answer, or what the process said when it ended."""
        given, answers = self.process.stdin, self.process.stdout
        assert given is not None and answers is not None
        found: list[Result] | None = None
        try:
            pickle.dump(request, given)
            given.flush()
            do_meanwhile()
            found = pickle.load(answers)
        except (BrokenPipeError, EOFError):
            self.errors.seek(0)
            return self.errors.read().decode(errors="replace") or "it ended"
        finally:
            if found is None:  # interrupted, its next answer would be to this request
                self.end()
        return found

    def end(self) -> None:
        """Its forks end when they are done."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


def expect(target: GpuTarget) -> None:
    """Something will have to be compiled for ``target``."""
    with _lock:
        _started(target)


def compile_in_forks(units: Sequence[Unit], target: GpuTarget) -> list[Result]:
    """In as many processes as there are processors, the longest first."""
    order = sorted(range(len(units)), key=lambda k: -len(units[k].text))
    fields = [asdict(units[k]) for k in order]
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    # what is compiled is kept in blade's cache, not in Triton's
    with tempfile.TemporaryDirectory(prefix="blade-") as folder, _lock:
        found = _started(target).ask((fields, folder, processes))
    if isinstance(found, str):
        return [found] * len(units)
    results = dict(zip(order, found, strict=True))
    return [results[k] for k in range(len(units))]


def _started(target: GpuTarget) -> _Server:
    global _server
    if _server is None or not _server.serves(target.arch):
        if _server is not None:
            _server.end()
        _server = _Server(target.arch)
    return _server

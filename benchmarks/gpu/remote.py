# SPDX-License-Identifier: Apache-2.0
"""An object in a process of its own, driven over a pipe, every answer within a limit of time.

    remote = Remote("gpu.inference", "Calls", {"model": "bert", "peer": "inductor"})
    remote.ask("prepare", limit=120.0)           # what Calls(**given).prepare() returns

One process per peer: an illegal access on a GPU ends every later call of its process, and only of that.
"""

import atexit
import contextlib
import importlib
import multiprocessing as mp
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class PeerFailed(Exception):
    """The peer raised, took too long, or its process died."""


class Remote:
    """The parent's end. Raises nothing before the first ``ask``. ``start``: multiprocessing's way to start it."""

    def __init__(
        self, module: str, name: str, given: Mapping[str, Any], start: str = "spawn"
    ) -> None:
        context = mp.get_context(start)
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, module, name, dict(given)))
        self._process.start()
        atexit.register(self.close)  # not a daemon, which may have no children: compilers have some
        child.close()

    def ask(self, command: str, limit: float, **kwargs: Any) -> Any:
        """The answer to ``command`` within ``limit`` seconds; raises ``PeerFailed``, and then it is closed."""
        try:
            self._pipe.send((command, kwargs))
            if not self._pipe.poll(max(limit, 0.0)):
                raise PeerFailed(f"{command} took more than {limit:.0f} s")
            ok, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError, OSError):
            self._process.join(5)
            self.close()
            raise PeerFailed(f"process died, exit code {self._process.exitcode}") from None
        except PeerFailed:
            self.close()
            raise
        if not ok:
            self.close()
            raise PeerFailed(answer)
        return answer

    def close(self) -> None:
        """Ends the process, at once."""
        atexit.unregister(self.close)
        self._pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def _serve(pipe: Connection, module: str, name: str, given: dict[str, Any]) -> None:
    # Compilers talk on stdout; the parent's table belongs there.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="bench_gpu", ignore_cleanup_errors=True) as folder:
        empty_caches(Path(folder))
        made: Any = None
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                command, kwargs = pipe.recv()
                try:
                    if made is None:
                        made = getattr(importlib.import_module(module), name)(**given)
                    answer = getattr(made, command)(**kwargs)
                except (
                    Exception
                ) as error:  # the peer's: the parent reports it and goes on without it
                    pipe.send((False, f"{type(error).__name__}: {str(error)[:600]}"))
                else:
                    pipe.send((True, answer))


def empty_caches(folder: Path) -> None:
    """Compiling is measured: nothing compiled before is found."""
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "BLADE_CACHE_DIR"):
        os.environ[variable] = str(folder / variable.lower())

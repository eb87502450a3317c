# SPDX-License-Identifier: Apache-2.0
"""``torch.classes.blade.Engine`` for Python: a compiled cluster that answers or gives the reason why not.

    engine = make_engine("cluster_0", "disc", program, object_bytes, constants, {"max_failures": 3})
    outs = engine.try_execute([x, y])      # None: run the original; engine.stats() says why

The class is C++ (``csrc``), so a saved module runs without Python. This module loads it, types its methods,
and lets Python backends provide the runner of their engines.
"""

import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from blade.errors import BackendError, ConfigError, warn_user
from blade.program.trust import register_verifier
from blade.runtime.interrupts import interrupts_noted

logger = logging.getLogger(__name__)

Runner = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# (name, payload, constants, program) -> the function that computes the engine's outputs
LoadRunner = Callable[[str, torch.Tensor, list[torch.Tensor], str], Runner]


class Engine(Protocol):
    """The methods of ``torch.classes.blade.Engine``.

    ``profile``, ``set_limit`` and ``set_signature`` raise ``RuntimeError``; ``try_execute`` raises only
    interrupts (interrupts.py), which are not failures of the engine.
    """

    def try_execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The outputs, or ``None`` if the original must run; ``stats`` counts the cause."""

    def stats(self) -> dict[str, int]:
        """``calls``, ``engine_runs``, ``fallbacks`` and a count per ``Code`` value that occurred.

        On CUDA also ``graph_captures``, ``graph_replays`` (of ``engine_runs``), ``graph_failures`` (shapes that
        could not be captured and run launch by launch; ``last_error`` has the reason), ``graph_declined``
        (shapes of one or two launches, or with large copies, which are faster without a graph) and
        ``graph_bytes_copied`` into and out of graphs. Of memory that no call uses now: ``arena_bytes`` of
        intermediate values, ``graph_bytes`` of copies that graphs read and write, ``lent_bytes`` of outputs that
        graphs keep in their own memory (``lend``).
        """

    def set_enabled(self, enabled: bool) -> None:
        """A disabled engine refuses every call."""

    def adopt(self, successor: "Engine") -> bool:
        """Let ``successor`` replace this pending engine; ``False`` if it already has a successor."""

    def rearm(self) -> None:
        """Close the circuit breaker, and let a runner that failed to load try again."""

    def renew(self) -> None:
        """Reset counts and failures, and free the buffers of all sizes. Must not overlap a call."""

    def trim(self) -> None:
        """Free the buffers and graphs of all sizes that no call uses now; later calls make them again."""

    def lend(self, outputs: list[int]) -> None:
        """Return these outputs, by number, in the CUDA graph's own memory, without a copy.

        The graph is not launched again before all references to them are gone. Outputs that share memory with
        another one are copied. Call this before the first call of the engine.
        """

    def set_limit(self, name: str, value: int) -> None:
        """Set "autocast", "recheck_every" or "recheck_tolerance" (``make_engine``), before the first call."""

    def is_due(self) -> bool:
        """Is a recheck due: must the last answer be compared with the original's (``recheck_every``)?"""

    def agrees(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
        """Does the engine's answer agree with the original's? If not, it is counted as ``drifted``."""

    def signature(self) -> str: ...

    def set_signature(self, signature: str) -> None:
        """Set the signature, made with a key, of the engine's content; it is saved with the engine."""

    def last_error(self) -> str:
        """The text of the last exception inside the engine; empty if there was none."""

    def why_unavailable(self) -> str:
        """Why this engine cannot run any call in this process; empty if it can."""

    def name(self) -> str: ...

    def backend(self) -> str: ...

    def program(self) -> str: ...

    def profile(self, inputs: list[torch.Tensor], repeats: int) -> tuple[list[str], list[float]]:
        """Every instruction of a DISC program with its mean seconds at these inputs."""


def make_engine(
    name: str,
    backend: str,
    program: str,
    object: torch.Tensor | bytes,
    constants: Sequence[torch.Tensor] = (),
    limits: Mapping[str, int] | None = None,
) -> torch.ScriptObject:
    """Make an engine; ``why_unavailable()`` of the result tells whether it can run here.

    ``object`` is native code (DISC) or the payload that the backend's ``LoadRunner`` reads. ``constants``
    should be the tensors of the fallback module themselves: a saved file then stores them once.

    ``limits``, with defaults in parentheses:

    * ``max_failures`` (3): failures in a row that open the circuit breaker
    * ``max_shapes`` (64): execution plans kept at a time
    * ``max_idle_bytes`` (512 MiB): buffers kept between calls
    * ``watch_constants`` (1): every call compares a sample of the packed constants' elements, to find
      writes that bump no version counter
    * ``autocast``: 1: the engine was made under autocast and also runs under it
    * ``recheck_every`` (0: never): one in so many answers is compared with the original's
    * ``recheck_tolerance``: the allowed difference, in units of 1e-9 of the original's largest magnitude
    * ``cuda_graphs``, CUDA: 1: capture shapes at their second use if that pays; 0: none; 2: all
    * ``max_graphs`` (32), CUDA: captured graphs kept per stream
    * ``reuse_output_buffers`` (0), CUDA: 1: outputs are the graph's own, and the next call overwrites them
    """
    payload = _to_tensor(object) if isinstance(object, bytes) else object
    engine = torch.classes.blade.Engine(
        name, backend, program, payload, list(constants), {**(limits or {}), "token": _token()}
    )
    return cast(torch.ScriptObject, engine)


def make_pending(name: str) -> torch.ScriptObject:
    """A placeholder for an engine that is not compiled yet; it refuses every call until it adopts the engine.

    A placeholder that is saved before that refuses all calls; saved afterwards, it is the adopted engine.
    """
    return make_engine(name, "pending", "", b"")


def register_runner(backend: str, load: LoadRunner, keeps_inputs: bool = False) -> None:
    """Register ``load``, which returns the runner of an engine of ``backend``, once per engine and process.

    ``load`` raises ``BackendError`` if the engine cannot work in this process; the original then runs. The
    runner must be safe to call from several threads at once. Its results belong to the caller: own memory
    on the inputs' device, to which no later call writes. It gets copies of the inputs unless
    ``keeps_inputs`` promises that it never writes to them, even on failure, since the original computes
    from the same inputs. In a forked process ``load`` is called again, since a library's threads do not
    survive a fork.

    The engine's program (``program/FORMAT.md``) has the guards. If it also declares ``output`` slots, the
    number, dtypes and sizes of each answer are checked, and a mismatch counts as an exception. Values
    cannot be checked without running the original: an engine that was verified and later answers NaN is not
    detected.
    """
    _loaders[backend] = load
    torch.ops.blade.announce_runner(backend, keeps_inputs)


def allow_ops(*names: str) -> None:
    """Allow these ops, such as ``"torchvision::roi_align"``, in programs of files that this process loads.

    Torch's functional ops are always allowed. The file chooses the arguments of such an op. Raises
    ``ConfigError`` for a malformed name.
    """
    for name in names:
        space, _, op = name.partition("::")
        if not (space and op) or "." in name:
            raise ConfigError(
                f"allow_ops: an op is named like 'torchvision::roi_align', not {name!r}"
            )
        torch.ops.blade.allow_op(name)


def renew(engine: torch.ScriptObject) -> None:
    """Reset ``engine`` in place, for all references to it: counts, failures and the buffers of all sizes.

    Loaded code and packed constants stay.
    """
    cast(Engine, engine).renew()


def isa_features() -> frozenset[str]:
    """The features of this CPU, by their names in ``/proc/cpuinfo``; programs are checked against them."""
    return frozenset(torch.ops.blade.isa_features())


_loaders: dict[str, LoadRunner] = {}
_load_lock = threading.RLock()


@functools.cache
def _token() -> int:
    """The token that proves to the runtime that this process made an engine, not code in a file."""
    library = ctypes.CDLL(str(_library_path()))
    library.blade_token.restype = ctypes.c_int64
    return int(library.blade_token())


def _to_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A runner, the process that loaded it, and the function that loads it again."""

    process: int
    runner: Runner
    load: Callable[[], Runner]


_process = os.getpid()
_alive: weakref.WeakSet[_Loaded] = weakref.WeakSet()


def _note_process() -> None:
    global _process
    _process = os.getpid()


def _keep_runners_of_parent() -> None:
    """Never free what the parent loaded: a library's destructor waits for its threads, which are not here."""
    for one in _alive:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _new_lock() -> None:
    """Replace the lock after a fork: another thread of the parent may have held it."""
    global _load_lock
    _load_lock = threading.RLock()


os.register_at_fork(after_in_child=_note_process)
os.register_at_fork(after_in_child=_keep_runners_of_parent)
os.register_at_fork(after_in_child=_new_lock)


def _load_runner(
    backend: str, name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
) -> str:
    """Store the runner on ``payload``, which belongs to one engine and lives as long as it.

    Returns the reason if the runner cannot be loaded, else an empty text.
    """
    # an alias: a runner that holds its payload must not keep the engine's tensor alive
    alias = payload.detach()
    with _load_lock, interrupts_noted():
        if hasattr(payload, "_blade_runner"):
            return ""

        def load() -> Runner:
            return _loaders[backend](name, alias, constants, program)

        try:
            loaded = _Loaded(_process, load(), load)
            _alive.add(loaded)
        except BackendError as error:
            warn_user(f"Engine {name} is not used, the original runs instead: {error}")
            return str(error)
        cast(Any, payload)._blade_runner = loaded
    logger.info("loaded engine %s of backend %s", name, backend)
    return ""


def _run_runner(payload: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with interrupts_noted():
        return list(_runner_of(payload)(inputs))


def _runner_of(payload: torch.Tensor) -> Runner:
    loaded: _Loaded = cast(Any, payload)._blade_runner
    if loaded.process == _process:
        return loaded.runner
    with _load_lock:
        loaded = cast(Any, payload)._blade_runner
        if loaded.process != _process:
            loaded = _Loaded(_process, loaded.load(), loaded.load)
            _alive.add(loaded)
            cast(Any, payload)._blade_runner = loaded
    return loaded.runner


def _library_path() -> Path:
    package = Path(__file__).resolve().parent.parent
    found = sorted(package.glob("libblade_runtime*.so"))
    if not found:
        raise BackendError(
            f"blade's C++ runtime is not built: there is no libblade_runtime.so in {package}. "
            "Run `pip install --no-build-isolation -e .` in the source folder."
        )
    return found[0]


def _load_library() -> torch.library.Library:
    path = _library_path()
    try:
        torch.classes.load_library(str(path))
    except OSError as error:
        raise BackendError(
            f"blade's C++ runtime {path} cannot be loaded by torch {torch.__version__} ({error}); it has to be "
            "built with the torch it runs with: run `pip install --no-build-isolation --force-reinstall --no-deps .` "
            "in the source folder (with `-e .` where blade is used from there)."
        ) from error
    if _knows_interrupts():
        torch.ops.blade.expect_interrupts()
    library = torch.library.Library("blade", "IMPL")
    library.impl("load_runner", _load_runner, "CompositeImplicitAutograd")
    library.impl("run_runner", _run_runner, "CompositeImplicitAutograd")
    register_verifier(library)
    return library


def _knows_interrupts() -> bool:
    """Import the module that passes interrupts on; without it, TorchScript turns them into RuntimeError."""
    return importlib.util.find_spec("blade._interrupts") is not None and bool(
        importlib.import_module("blade._interrupts")
    )


library = _load_library()

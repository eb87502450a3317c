# SPDX-License-Identifier: Apache-2.0
"""``torch.classes.blade.Engine`` for Python: a compiled cluster that answers or says why it does not.

    engine = make_engine("cluster_0", "disc", program, object_bytes, constants, {"max_failures": 3})
    outs = engine.try_execute([x, y])      # None: run the original; engine.stats() says why

The class itself is C++ (``csrc``), so a saved module runs without Python; this file loads it, types
its methods, and lets backends written in Python provide the function behind their engines.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from blade.errors import BackendError

logger = logging.getLogger(__name__)

Runner = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# (name, payload, constants, program) -> the function that computes the engine's outputs
LoadRunner = Callable[[str, torch.Tensor, list[torch.Tensor], str], Runner]


class Engine(Protocol):
    """The methods of ``torch.classes.blade.Engine``; none but ``profile`` raises."""

    def try_execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The outputs, or ``None`` where the original has to run; ``stats`` counts the cause."""

    def stats(self) -> dict[str, int]:
        """``calls``, ``engine_runs``, ``fallbacks`` and a count per ``Code`` value that occurred.

        On CUDA also ``graph_captures``, ``graph_replays`` (of ``engine_runs``), ``graph_failures`` (shapes that
        could not be captured and run launch by launch, ``last_error`` says why), ``graph_declined`` (shapes
        of one launch or two, or of large copies, that are faster that way) and ``graph_bytes_copied`` into and out
        of graphs.
        """

    def set_enabled(self, enabled: bool) -> None:
        """A disabled engine refuses every call."""

    def adopt(self, successor: "Engine") -> bool:
        """From now on ``successor`` serves in place of a pending engine; ``False`` if one does already."""

    def rearm(self) -> None:
        """Closes the circuit breaker again and lets a runner that failed to load try once more."""

    def renew(self) -> None:
        """Forgets its calls: counts, failures and the buffers of sizes seen. Must not overlap a call."""

    def lend(self, outputs: list[int]) -> None:
        """Of these outputs, by number, a CUDA graph gives its own memory, and is not launched again before all
        who hold them let go. Nothing is lent of an output that shares memory with another one. Before the first call.
        """

    def last_error(self) -> str:
        """The text of the last exception inside the engine; empty if there was none."""

    def why_unavailable(self) -> str:
        """Empty, or a sentence: this engine cannot serve any call in this process."""

    def name(self) -> str: ...

    def backend(self) -> str: ...

    def program(self) -> str: ...

    def profile(self, inputs: list[torch.Tensor], repeats: int) -> tuple[list[str], list[float]]:
        """Every instruction of a DISC program and its mean seconds at these inputs."""


def make_engine(
    name: str,
    backend: str,
    program: str,
    object: torch.Tensor | bytes,
    constants: Sequence[torch.Tensor] = (),
    limits: Mapping[str, int] | None = None,
) -> torch.ScriptObject:
    """An engine; ``why_unavailable()`` of the result tells whether it can run here.

    ``object`` is native code (DISC) or whatever the backend's ``LoadRunner`` reads. ``constants``
    should be the very tensors the fallback module holds: a saved file then stores them once.
    ``limits``: ``max_failures`` in a row that open the circuit breaker (3), ``max_shapes`` prepared
    at a time (64), ``max_idle_bytes`` of buffers kept between calls (512 MiB), ``watch_constants`` (1: a sample
    of the elements of what was packed is looked at in every call, for writes that no version counter tells of).
    On CUDA also ``cuda_graphs`` (1: shapes are captured at their second use where that pays; 0: none, 2: all),
    ``max_graphs`` kept per stream (32),
    ``reuse_output_buffers`` (0; 1: outputs are the graph's own, and the next call overwrites them).
    """
    payload = _to_tensor(object) if isinstance(object, bytes) else object
    engine = torch.classes.blade.Engine(
        name, backend, program, payload, list(constants), dict(limits or {})
    )
    return cast(torch.ScriptObject, engine)


def make_pending(name: str) -> torch.ScriptObject:
    """An engine that is still to come: it refuses every call until it adopts the one that was made.

    Saved before that, it is one that never comes; saved after, it is the one it adopted.
    """
    return make_engine(name, "pending", "", b"")


def register_runner(backend: str, load: LoadRunner) -> None:
    """Engines of ``backend`` compute with the function ``load`` returns (called once an engine).

    ``load`` raises ``BackendError`` where the engine cannot work in this process; the original then
    runs. The function must be safe to call from several threads at once.

    The engine's program (``backends/disc/FORMAT.md``) has the guards. If it also declares ``output``
    slots, each answer is checked for their number, dtypes and sizes, and one that differs counts as an
    exception. Values cannot be checked without running the original: an engine that was right when it
    was verified and later answers NaN is not noticed.
    """
    _loaders[backend] = load
    torch.ops.blade.announce_runner(backend)


def renew(engine: torch.ScriptObject) -> None:
    """Start ``engine`` afresh, in place, wherever it is held: no counts, no failures, and no buffers
    of the sizes it was tried at. What it loaded and packed stays."""
    cast(Engine, engine).renew()


def isa_features() -> frozenset[str]:
    """What this CPU can do, by the names of ``/proc/cpuinfo``, as programs are checked against."""
    return frozenset(torch.ops.blade.isa_features())


_loaders: dict[str, LoadRunner] = {}
_load_lock = threading.RLock()


def _to_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def _load_runner(
    backend: str, name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
) -> str:
    """Keeps the runner on ``payload``, which belongs to one engine and lives as long as it does."""
    with _load_lock:
        if hasattr(payload, "_blade_runner"):
            return ""
        try:
            # an alias: a runner that holds its payload must not keep the engine's tensor alive
            runner = _loaders[backend](name, payload.detach(), constants, program)
        except BackendError as error:
            logger.warning("engine %s is not used; the original runs instead: %s", name, error)
            return str(error)
        cast(Any, payload)._blade_runner = runner
    logger.info("loaded engine %s of backend %s", name, backend)
    return ""


def _run_runner(payload: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    runner: Runner = cast(Any, payload)._blade_runner
    return list(runner(inputs))


def _load_library() -> torch.library.Library:
    package = Path(__file__).resolve().parent.parent
    found = sorted(package.glob("_runtime*.so"))
    if not found:
        raise BackendError(
            f"blade's C++ runtime is not built: there is no _runtime*.so in {package}. "
            "Run `pip install --no-build-isolation -e .` in the source folder."
        )
    try:
        torch.classes.load_library(str(found[0]))
    except OSError as error:
        raise BackendError(
            f"blade's C++ runtime {found[0]} cannot be loaded by torch {torch.__version__} ({error}); it has to be "
            "built with the torch it runs with: run `pip install --no-build-isolation --force-reinstall --no-deps .` "
            "in the source folder (with `-e .` where blade is used from there)."
        ) from error
    library = torch.library.Library("blade", "IMPL")
    library.impl("load_runner", _load_runner, "CompositeImplicitAutograd")
    library.impl("run_runner", _run_runner, "CompositeImplicitAutograd")
    return library


_library = _load_library()

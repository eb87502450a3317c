# SPDX-License-Identifier: Apache-2.0
"""Capture the paths that calls have shown to be missing, in the background (``Config.background_paths``).

    learner = learn_paths(module, captured, optimize, config)
    learner.wait(60)                       # True: nothing is being captured

A call that no path of ``module`` answers goes to ``PathLearner``. It gives the call to the module that it has made
of such calls, else to the original, and lets a thread optimize the model at copies of all inputs that went to the
original. That module takes the place of the one before: weights exist twice at most, besides the original's.
"""

import atexit
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.capture.inputs import Sample
from blade.capture.reference_model import ReferenceModel, copy_of
from blade.config import Config
from blade.core import learned_calls
from blade.core.attempt import attempt
from blade.core.captured import Captured
from blade.core.reason import Code, Reason, Stage
from blade.errors import BladeError, log_warnings
from blade.fallback.isolated_convert import end_conversions
from blade.runtime.originals import answer_with, answering, number_of
from blade.selection.lent_original import LentOriginal

EXIT_S = 60.0  # s; how long the interpreter's exit waits for a capture that runs
Optimize = Callable[[torch.nn.Module, Any, Config], torch.jit.ScriptModule]

_log = logging.getLogger(__name__)


def learn_paths(
    module: torch.jit.ScriptModule, captured: Captured, optimize: Optimize, config: Config
) -> "PathLearner | None":
    """Let a learner answer where no path of ``module`` does, as long as ``module`` lives.

    ``None`` if the original does not answer there, if all of ``Config.max_paths`` are taken, or if the model is
    quantized: what one call would calibrate is not what the samples did.
    """
    left = config.max_paths - len(captured.paths)
    lent = answering(captured.original_number)
    if lent is None or left < 1 or config.quantizes:
        return None
    assert isinstance(lent, LentOriginal), lent
    config = config.evolve(background=False, background_paths=False, strict=False, max_paths=left)
    learner = PathLearner(captured.original_number, lent, optimize, config)
    weakref.finalize(learner, learned_calls.forget, captured.original_number)
    answer_with(captured.original_number, learner)
    with _lock:
        _learners[module] = learner
    return learner


def wait_for_paths(module: torch.nn.Module, timeout: float | None) -> bool:
    """Wait at most ``timeout`` seconds; return whether no path is being captured for ``module``."""
    with _lock:
        learner = _learners.get(module)
    return learner is None or learner.wait(timeout)


class PathLearner:
    """Answers the calls of one number, and optimizes the model at inputs of at most ``Config.max_paths`` of them."""

    def __init__(self, number: int, lent: LentOriginal, optimize: Optimize, config: Config) -> None:
        self._number, self._lent, self._optimize = number, lent, optimize
        self._config = config
        self._missed: list[Any] = []
        self._learned: torch.jit.ScriptModule | None = None
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self.thread: threading.Thread | None = None

    def __call__(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of the output at ``inputs``, the entries of a sample."""
        learned = self._learned
        if learned is None or self._lent.has_changed:
            return self._miss(inputs)
        learned_calls.count(self._number, 1)
        return pytree.tree_leaves(learned(*inputs))

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds; return whether nothing is being captured."""
        return self._idle.wait(timeout)

    def miss_again(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """What the learned module does not answer either."""
        learned_calls.count(self._number, -1)
        return self._miss(inputs)

    def _miss(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        sample = None
        with self._lock:
            if (
                self._idle.is_set()
                and len(self._missed) < self._config.max_paths
                and not self._lent.has_changed
                and not _ending.is_set()
            ):
                sample = copy_of(inputs)  # before the model writes to them
                self._idle.clear()
        may_learn = False
        try:
            answer = self._lent(inputs)
            may_learn = not self._lent.has_changed
        finally:
            if sample is not None and not may_learn:
                self._idle.set()  # nothing to learn
        if sample is not None and may_learn:
            self._start(sample)
        return answer

    def _start(self, sample: Sample) -> None:
        self.thread = threading.Thread(
            target=self._learn, args=(sample,), name="blade-learn-path", daemon=True
        )
        with _lock:
            _busy.add(self)
        self.thread.start()

    def _learn(self, sample: Sample) -> None:
        log_warnings()
        try:
            self._missed.append(_as_inputs(self._lent.model, sample))
            name = self._lent.model.name
            try:
                found = attempt(Stage.CAPTURE, None, name, self._made, code=Code.TRACE_FAILED)
            except BladeError as error:
                found = Reason(Stage.CAPTURE, Code.TRACE_FAILED, None, name, str(error))
            if isinstance(found, Reason):
                self._missed[-1] = None
                _log.info("%s: no further path was captured: %s", name, found.detail)
            else:
                self._learned = found
                _log.info("%s: a further path was captured", name)
        finally:
            with _lock:
                _busy.discard(self)
            self._idle.set()

    def _made(self) -> torch.jit.ScriptModule:
        samples = [one for one in self._missed if one is not None]
        made = self._optimize(self._lent.model.module, samples, self._config)
        number = number_of(made.graph)
        if (
            number
        ):  # what it misses is missed here: the copy of the model that it was made of is not needed
            answer_with(number, _Weakly(self))
        return made


class _Weakly:
    """Calls ``miss_again`` of a learner, without keeping it alive: it keeps the module that calls this."""

    def __init__(self, learner: PathLearner) -> None:
        self._learner = weakref.ref(learner)

    def __call__(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        learner = self._learner()
        assert learner is not None, "the learned module is called by its learner alone"
        return learner.miss_again(inputs)


def _as_inputs(original: ReferenceModel, sample: Sample) -> Any:
    """``sample`` as ``blade.optimize`` takes it: a tuple of arguments, or a dict if some go by keyword."""
    args, kwargs = original.bind(sample)
    if not kwargs:
        return args
    parameters = list(inspect.signature(original.module.forward).parameters)
    return {**dict(zip(parameters, args)), **kwargs}


def _end() -> None:
    """At exit: start nothing more, and wait for what runs. A thread that is in native code when the interpreter
    is finalized would crash the process."""
    _ending.set()
    with _lock:
        left = list(_busy)
    if left:
        end_conversions()
    for learner in left:
        assert learner.thread is not None
        learner.thread.join(EXIT_S)


_lock = threading.Lock()
_ending = threading.Event()
_learners: "weakref.WeakKeyDictionary[torch.nn.Module, PathLearner]" = weakref.WeakKeyDictionary()
_busy: set[PathLearner] = set()
atexit.register(_end)

# SPDX-License-Identifier: Apache-2.0
"""What answers the calls of a drop-in: optimized modules by kind of call, and the model for everything else.

state = DropInState(model, config)
state.answer((ids,), {"use_cache": False})       # model's answer, which is recorded; later an optimized module's
"""

import atexit
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

import torch
from torch import nn

from blade.capture.reference_model import MODEL_ERRORS
from blade.config import Config
from blade.core import torchscript
from blade.core.reason import Code, Reason, Stage
from blade.dropin.call_kind import Call, CallKind, CallReader, varying
from blade.dropin.call_recorder import CallRecorder
from blade.dropin.nested import NotNested
from blade.dropin.prepare import CHANGES_ITSELF, Prepared, Tensors, prepare
from blade.dropin.recording import Calls
from blade.dropin.watched import Watch, obstacle
from blade.errors import log_warnings, warn_user
from blade.fallback.isolated_convert import end_conversions
from blade.report import READY, SEARCHING, Report, rearm, report, stats
from blade.runtime.originals import answer_with

CALLS = 3  # of a kind, before it is optimized in the background
STATES = 4  # of the model, whose optimized modules are kept
RENEWALS = 3  # how often a model that has changed is optimized again
EXIT_S = 60.0  # s; how long the interpreter's exit waits for what runs

_log = logging.getLogger(__name__)


class PartDropIns(Protocol):
    """The drop-ins that stand in places inside of a model or a program, by name (``PartSwapper``)."""

    drop_ins: dict[str, Any]
    reasons: list[Reason]

    def wait(self, timeout: float | None) -> bool: ...


@dataclass(frozen=True)
class _Earlier:
    """What was made of the model in an earlier state of its attributes: an adapter that was turned off, say.

    ``digest``: of its weights then; ``weights`` keeps them alive, so that no other tensor has their identity.
    """

    state: Any
    digest: Any
    weights: tuple[torch.Tensor, ...]
    prepared: dict[CallKind, Prepared]
    others: dict[CallKind, Prepared]
    settled: set[CallKind]
    refused: set[CallKind]


class DropInState:
    """Answers the calls of one drop-in. Threads may call it at once.

    ``model`` has the class of the user's model; its ``forward`` answers what no optimized module does.
    """

    def __init__(self, model: nn.Module, config: Config, in_background: bool) -> None:
        self.model = model
        self.config = config
        self.prepared: dict[CallKind, Prepared] = {}
        self.reasons: list[Reason] = []
        # For calls that no path of the first one answers.
        self.others: dict[CallKind, Prepared] = {}
        self.calls: dict[Prepared, int] = {}
        self.original_calls = 0
        self.is_split = False  # parts of the model are drop-ins, and its own calls are the model's
        # Called if no kind of call can be optimized.
        self.on_refused: Callable[[], Any] | None = None
        self.parts: PartDropIns | None = None
        self._in_background = in_background
        self._reader = CallReader(inspect.signature(model.forward))
        self._recorder = CallRecorder()
        self._missed = CallRecorder()  # calls that no path answered
        self._settled: set[CallKind] = set()  # kinds whose missed calls were tried
        self._refused: set[CallKind] = set()
        self._constants: frozenset[str] = frozenset()  # ints that no graph has as a number
        self._working: set[CallKind] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._current = threading.local()
        self._renewals = 0
        self._generation = 0  # of the model: how often it has changed
        self._digest: Any = None  # of the weights that ``prepared`` was made of
        self._earlier: list[_Earlier] = []
        self._own_changes = 0  # calls of the model that changed it
        self._is_stateful = False
        self._has_warned = False
        self._watch = Watch(model)
        self._obstacle: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no drop-in."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def answer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``model.forward(*args, **kwargs)`` returns."""
        if self.is_split or self._is_the_models():
            return self._original(args, kwargs)
        if torch._C._is_any_autocast_enabled():
            self._tell(Code.GUARD_AUTOCAST, "Calls under autocast are the model's.")
            return self._original(args, kwargs)
        if self._watch.change() is not None:
            self._renew()
        if self._obstacle is not None:
            return self._original(args, kwargs)
        try:
            call = self._reader.read(args, kwargs)
        except NotNested as error:
            self._tell(
                Code.UNKNOWN_TYPE, f"Calls with {error} among their arguments are the model's."
            )
            return self._original(args, kwargs)
        prepared = self.prepared.get(call.kind)
        if prepared is None:
            return self._unprepared(call, args, kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            return self._original(args, kwargs)
        return self._run(prepared, call, args, kwargs)

    def optimize(self, calls: Calls) -> None:
        """Optimize for the kinds of ``calls`` now."""
        recorder = CallRecorder()
        self._recorded(calls, recorder)
        if numbers := varying(recorder.kinds):
            self._reader.numbers = numbers
            recorder = CallRecorder()
            self._recorded(calls, recorder)
        kinds = sorted(recorder.kinds, key=lambda kind: -recorder.kinds[kind].calls)
        for kind in kinds[: self.config.max_paths]:
            samples, counts = recorder.kinds[kind].frequent()
            self._take(kind, prepare(self.model, kind, samples, counts, self.config))

    def _recorded(self, calls: Calls, recorder: CallRecorder) -> None:
        for (args, kwargs), count in calls:
            try:
                recorder.add(self._reader.read(args, kwargs), count)
            except NotNested as error:
                self._tell(
                    Code.UNKNOWN_TYPE, f"Calls with {error} among their arguments are the model's."
                )

    def have(self, prepared: Iterable[Prepared]) -> None:
        """Let calls be answered by what was ``prepared`` elsewhere."""
        for one in prepared:
            self.prepared[one.kind] = one
            self._reader.numbers |= one.kind.numbers()

    def replace_part(self, replace: Callable[[], None]) -> None:
        """Let ``replace`` put a drop-in in the place of a layer of the model, which stays what it is."""
        if self._watch.change() is not None:
            self._renew()
        with self._lock:
            replace()
            self._watch.accept()

    @property
    def is_refused(self) -> bool:
        """Whether no call can be optimized as a whole, and parts of the model may do better."""
        codes = {reason.code for reason in self.reasons}
        is_refused = self._is_stateful or bool(self._refused)
        return not self.prepared and is_refused and Code.SLOWER not in codes

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds; return whether nothing is being optimized, for the parts neither."""
        end = None if timeout is None else monotonic() + timeout
        with self._idle:
            if not self._idle.wait_for(lambda: not self._working, timeout):
                return False
        if self.parts is None:
            return True
        return self.parts.wait(None if end is None else max(0.0, end - monotonic()))

    def report(self) -> Report:
        """The report of the module that answers most calls, with the reasons of the drop-in before its own."""
        found = self.most_called()
        name = type(self.model).__name__
        if not found:
            return report_of_parts(name, self.reasons, self.parts, bool(self._working))
        one = report(found[0].module)
        state = SEARCHING if self._working else READY
        return replace(one, reasons=(*self.reasons, *one.reasons), state=state)

    def stats(self) -> dict[str, dict[str, int]]:
        """The counters of each optimized module, of the calls that the model answered, and of the parts."""
        found: dict[str, dict[str, int]] = {}
        for place, one in enumerate((*self.most_called(), *self.others.values()), start=1):
            found[f"call {place}"] = {"calls": self.calls.get(one, 0)}
            counters = stats(one.module)
            found.update((f"call {place}: {k}", v) for k, v in counters.items() if k != "original")
        found["original"] = {"calls": self.original_calls}
        return found | stats_of_parts(self.parts)

    def rearm(self) -> None:
        """Try the engines again that the circuit breaker stopped."""
        for one in (*self.prepared.values(), *self.others.values()):
            rearm(one.module)
        for part in tuple(self.parts.drop_ins.values()) if self.parts is not None else ():
            rearm(part)

    def most_called(self) -> list[Prepared]:
        """What is prepared, the most called first."""
        return sorted(self.prepared.values(), key=lambda one: -self.calls.get(one, 0))

    def _is_the_models(self) -> bool:
        """Whether the model has to answer whatever the arguments are."""
        return self.model.training or torchscript.is_tracing() or torch.compiler.is_compiling()

    def _original(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.original_calls += 1
        return type(self.model).forward(self.model, *args, **kwargs)

    def _unprepared(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._in_background and self._generalize(call.kind):
            call = self._reader.read(args, kwargs)
        kind = call.kind
        if not self._in_background or kind in self._refused or kind in self._working:
            return self._original(args, kwargs)
        recorded = self._recorder.add(call)  # before the model writes to its arguments
        output = self._original(args, kwargs)
        if self._watch.change() is not None:
            self._changed_itself()
        elif recorded.calls >= CALLS:
            self._start(kind)
        return output

    def _miss(
        self, prepared: Prepared, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call for which ``prepared`` has no path. After a few, another module is made for such calls."""
        kind = prepared.kind
        other = self.others.get(kind)
        if other is not None and other is not prepared:
            return self._run(other, call, args, kwargs)
        if self._in_background and kind not in self._settled:
            recorded = self._missed.add(call)
            if recorded.calls >= CALLS and not _ending.is_set():
                self._settled.add(kind)
                self._begin(kind, self._missed)
        return self._original(args, kwargs)

    def _changed_itself(self) -> None:
        """Refuse all calls once several have changed the model; the first may only set something up."""
        with self._lock:
            self._own_changes += self._watch.change() is not None
            if self._own_changes < CALLS or not self._in_background:
                return
            self._in_background = False
            self._is_stateful = True
            self._note(Code.MUTATES, CHANGES_ITSELF)
        if self.on_refused is not None:
            self.on_refused()

    def _generalize(self, kind: CallKind) -> bool:
        """Whether an int among the arguments is a number of any value from now on, as it has had several."""
        ints = kind.ints().keys() - self._constants
        if not ints:
            return False
        with self._lock:
            known = (kind, *self.prepared, *self._recorder.kinds, *self._refused)
            found = varying(known) & ints
            self._reader.numbers |= found
            for one in [one for one in self.prepared if found & one.ints().keys()]:
                del self.prepared[one]
                self.others.pop(one, None)
        return bool(found)

    def _start(self, kind: CallKind) -> None:
        with self._lock:
            if kind in self._working or kind in self.prepared or _ending.is_set():
                return
            if len(self.prepared) + len(self._working) >= self.config.max_paths:
                self._refused.add(kind)
                detail = f"There are calls of more than max_paths={self.config.max_paths} kinds: a call {kind}."
                self._note(Code.NOT_TRIED, detail)
                return
        self._begin(kind, self._recorder)

    def _begin(self, kind: CallKind, recorder: CallRecorder) -> None:
        with self._lock:
            if kind in self._working or kind not in recorder.kinds:
                return  # another thread was first
            self._working.add(kind)
        thread = threading.Thread(
            target=self._work, args=(kind, recorder), name="blade-accelerate", daemon=True
        )
        with _lock:
            _busy.add(thread)
        thread.start()

    def _work(self, kind: CallKind, recorder: CallRecorder) -> None:
        log_warnings()
        try:
            with _one_at_a_time:
                samples, counts = recorder.kinds[kind].frequent()
                if not _ending.is_set() and samples:
                    generation = self._generation
                    found = prepare(self.model, kind, samples, counts, self.config)
                    if generation == self._generation:  # else of a model that has changed meanwhile
                        self._take(kind, found, is_other=recorder is self._missed)
            if self.is_refused and self.on_refused is not None:
                self.on_refused()
        finally:
            recorder.forget(kind)
            with self._idle:
                self._working.discard(kind)
                self._idle.notify_all()
            with _lock:
                _busy.discard(threading.current_thread())

    def _take(self, kind: CallKind, found: Prepared | Reason, is_other: bool = False) -> None:
        if isinstance(found, Reason) and is_other:
            self.reasons.append(found)
            return
        if isinstance(found, Reason):
            self._refused.add(kind)
            self._constants |= kind.numbers()
            self._reader.numbers -= kind.numbers()
            self.reasons.append(found)
            warn_user(f"The calls {kind} stay the model's own: {found.detail}")
            return
        if found.number:
            answer_with(found.number, _Original(self))
        if self._digest is None:
            self._digest = self._watch.digest()
        (self.others if is_other else self.prepared)[kind] = found
        _log.info("%s: calls %s are optimized", type(self.model).__name__, kind)

    def _run(
        self, prepared: Prepared, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        current = self._current
        current.call, current.output, current.error = (prepared, call, args, kwargs), _NONE, None
        try:
            answer = prepared.module(*call.tensors)
        except MODEL_ERRORS:
            if current.error is not None:
                raise current.error from None
            if current.output is _NONE:  # what the samples do not say: the model answers, or raises
                return self._original(args, kwargs)
            answer = ()
        finally:
            output, current.call, current.output, current.error = current.output, None, _NONE, None
        if output is not _NONE:
            return output
        self._warn_of_gradients()
        self.calls[prepared] = self.calls.get(prepared, 0) + 1
        return prepared.restored(call, answer)

    def answer_in_the_graph(self) -> list[torch.Tensor]:
        """Answer the call that this thread makes, of which no captured path is right, by the model.

        The tensors that are returned only fill the places of the output.
        """
        current = self._current
        missed = current.call
        prepared = missed[0]
        output, error = _NONE, None
        try:
            output = self._miss(*missed)
        finally:
            if output is _NONE:
                error = sys.exc_info()[1]
            current.call, current.output, current.error = (
                missed,
                output,
                error,
            )  # _miss may run another module
        return [torch.empty(0)] * prepared.outputs

    def _warn_of_gradients(self) -> None:
        if self._has_warned or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            warn_user(
                f"{type(self.model).__name__} was called in eval mode with gradients enabled; the output of an "
                "optimized call has none. Call it under torch.no_grad(), or train() it before training."
            )
        self._has_warned = True

    def _renew(self) -> None:
        """Forget what was made of the model as it was."""
        with self._lock:
            changed = self._watch.change()
            if changed is None:  # another thread has seen to it
                return
            self._put_aside()
            self._watch.accept()
            self._generation += 1
            self._obstacle = obstacle(self.model)
            what = f"The model answers: {self._obstacle}."
            if self._obstacle is None and self._take_up_again():
                what = "What was made of it in this state before answers again."
            elif self._obstacle is None:
                self._renewals += 1
                self._in_background = self._renewals <= RENEWALS
                what = (
                    "Its calls are recorded again." if self._in_background else "The model answers."
                )
            self._note(
                Code.MUTATES, f"The model is not the one that was optimized: {changed}. {what}"
            )

    def _put_aside(self) -> None:
        """Keep what was made of the model, for when it is again as it was."""
        state = self._watch.state()
        if self.prepared and self._digest is not None:
            kept = [one for one in self._earlier if one.state != state][1 - STATES :]
            made = (dict(self.prepared), dict(self.others), set(self._settled), set(self._refused))
            self._earlier = [*kept, _Earlier(state, self._digest, self._watch.weights, *made)]
        self._digest = None
        for one in (self.prepared, self.others, self._settled, self._refused):
            one.clear()

    def _take_up_again(self) -> bool:
        """Let what was made of the model as it is now answer; return whether there is something."""
        state = self._watch.state()
        found = next((one for one in self._earlier if one.state == state), None)
        if found is None or found.digest != self._watch.digest():
            return False
        self._digest = found.digest
        self.others.update(found.others)
        self._settled |= found.settled
        self._refused |= found.refused
        self.prepared.update(found.prepared)
        return True

    def _tell(self, code: Code, detail: str) -> None:
        with self._lock:
            self._note(code, detail)

    def _note(self, code: Code, detail: str) -> None:
        reason = Reason(Stage.RUN, code, None, type(self.model).__name__, detail)
        if reason not in self.reasons:
            self.reasons.append(reason)


def report_of_parts(
    name: str, reasons: Sequence[Reason], parts: PartDropIns | None, is_working: bool
) -> Report:
    """A report for what has no optimized module itself: of its first part that has one, with all reasons."""
    reports = (
        {} if parts is None else {one: report(made) for one, made in tuple(parts.drop_ins.items())}
    )
    told = [*reasons, *([] if parts is None else parts.reasons)]
    told += [reason for one in reports.values() for reason in one.reasons]
    is_working = is_working or any(one.state == SEARCHING for one in reports.values())
    state = SEARCHING if is_working else READY
    for part, one in reports.items():
        if one.clusters:
            return replace(one, model=f"{name}.{part}", reasons=tuple(told), state=state)
    return Report(reasons=tuple(told), state=state, model=name)


def stats_of_parts(parts: PartDropIns | None) -> dict[str, dict[str, int]]:
    """The counters of each part, behind its name."""
    if parts is None:
        return {}
    return {
        f"{name}: {key}": counters
        for name, made in tuple(parts.drop_ins.items())
        for key, counters in stats(made).items()
    }


class _Original:
    """Answers for the original in the graph of an optimized module, without keeping the state alive."""

    def __init__(self, state: DropInState) -> None:
        self._state = weakref.ref(state)

    def __call__(self, inputs: Tensors) -> list[torch.Tensor]:
        state = self._state()
        if state is None:
            raise RuntimeError(
                "The drop-in that this module belongs to is gone; keep it, or load its file."
            )
        return state.answer_in_the_graph()


def _end() -> None:
    """At exit: start nothing more, and wait for what runs. A thread that is in native code when the interpreter
    is finalized would crash the process."""
    _ending.set()
    with _lock:
        left = list(_busy)
    if left:
        end_conversions()
    for thread in left:
        thread.join(EXIT_S)


_NONE = object()  # no output
_lock = threading.Lock()
_one_at_a_time = threading.Lock()
_ending = threading.Event()
_busy: set[threading.Thread] = set()
atexit.register(_end)

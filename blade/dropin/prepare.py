# SPDX-License-Identifier: Apache-2.0
"""From recorded calls of one kind to an optimized module that answers them, or the reason why there is none.

prepared = prepare(model, kind, samples, counts, config)
prepared.answer(call)          # what model.forward would return
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

import torch
from torch import nn

from blade.api import optimize
from blade.capture.reference_model import MODEL_ERRORS, ModelState, copy_of
from blade.capture.samples import Samples
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.dropin.caches import NotServed, apply, count_in_cache
from blade.dropin.call_kind import Call, CallKind
from blade.dropin.flat_call import FlatCall, Outcome, flat_call
from blade.dropin.nested import NotNested, count_tensors, made
from blade.dropin.sharing_copy import sharing_copy
from blade.errors import BladeError, Refused
from blade.process.torch_state import generators_left_alone
from blade.report import report
from blade.runtime.originals import number_of
from blade.verification.draws import Draws

Tensors = tuple[torch.Tensor, ...]
CHANGES_ITSELF = "forward changes the model: a buffer or an attribute of it. The model answers itself, so that it does."


@dataclass(frozen=True, eq=False)
class Prepared:
    """An optimized module for the calls of ``kind``, and what to make of its tensors."""

    kind: CallKind
    module: torch.jit.ScriptModule
    outcome: Outcome
    number: int  # of the original in the module's graph, 0 if it asks none

    @property
    def outputs(self) -> int:
        """The number of tensors that the module returns."""
        structure, after = self.outcome
        return count_tensors(structure) + sum(map(count_in_cache, after))

    def restored(self, call: Call, answer: Any) -> Any:
        """The output in the model's form; the caches of ``call`` are as the model would leave them."""
        structure, after = self.outcome
        tensors = iter((answer,) if isinstance(answer, torch.Tensor) else answer)
        output = made(structure, tensors, call.caches)
        for cache, facts in zip(call.caches, after):
            apply(cache, facts, tensors)
        return output


def prepare(
    model: nn.Module,
    kind: CallKind,
    samples: Sequence[Tensors],
    counts: Sequence[int],
    config: Config,
) -> Prepared | Reason:
    """Optimize ``model`` for calls of ``kind`` at ``samples``, of which ``counts`` were seen.

    ``model`` stays as it is. Autocast is off, whatever the caller's is.
    """
    name = type(model).__name__

    def work() -> Prepared:
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            return _prepare(model, kind, samples, counts, config)

    try:
        return attempt(Stage.CAPTURE, None, name, work, code=Code.TRACE_FAILED)
    except BladeError as error:
        return Reason(Stage.CAPTURE, Code.TRACE_FAILED, None, name, str(error))


def _prepare(
    model: nn.Module,
    kind: CallKind,
    samples: Sequence[Tensors],
    counts: Sequence[int],
    config: Config,
) -> Prepared:
    flat = flat_call(sharing_copy(model), kind)
    is_random = _check_state(flat, samples[0])
    config = config.evolve(background=False, background_paths=False)
    recorded = Samples(samples, counts)
    with nullcontext() if is_random else generators_left_alone():
        module = optimize(flat, recorded, config)
    outcomes = flat.seen.outcomes
    if len(outcomes) != 1:
        raise Refused(
            Code.UNKNOWN_TYPE,
            f"The output of a call {kind} has {len(outcomes)} different structures, by the sizes or values of tensors.",
        )
    if (ratio := _ratio_to_eager(module)) is not None and ratio < 1:
        raise Refused(
            Code.SLOWER,
            f"The optimized module runs at {ratio:.2f}x the speed of the model called from Python.",
        )
    return Prepared(kind, module, next(iter(outcomes)), number_of(module.graph))


def _check_state(flat: FlatCall, sample: Tensors) -> bool:
    """Whether a call draws random numbers. Raises ``Refused`` if it changes the model: the second one, as many set
    something up in their first."""
    draws = Draws()
    with torch.no_grad():
        try:
            flat(*copy_of(sample))
            state = ModelState(flat)
            with draws:
                flat(*copy_of(sample))
        except NotNested as error:
            raise Refused(Code.UNKNOWN_TYPE, f"The output has {error}.") from error
        except NotServed as error:
            raise Refused(Code.UNKNOWN_TYPE, f"It leaves a {error}.") from error
        except MODEL_ERRORS as error:
            raise Refused(Code.TRACE_FAILED, f"The model raised {error!r}.") from error
    if state.restore():
        raise Refused(Code.MUTATES, CHANGES_ITSELF)
    return draws.seen


def _ratio_to_eager(module: torch.jit.ScriptModule) -> float | None:
    timings = [t for t in report(module).timings if t.eager_ms is not None]
    if not timings:
        return None
    return exp(fsum(log((t.eager_ms or 0.0) / t.engine_ms) for t in timings) / len(timings))

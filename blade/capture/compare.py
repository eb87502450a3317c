# SPDX-License-Identifier: Apache-2.0
"""Whether a captured module computes what the original does, and where it does not."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.jit._fuser import optimized_execution
from torch.utils import _pytree as pytree

from blade.budget import ELSEWHERE, AccuracyBudget, output_error
from blade.capture.captured import Reference
from blade.capture.exact import Exact
from blade.capture.inputs import Sample
from blade.capture.original import Answer, Original, State, answer_of, seeded
from blade.capture.probes import Axis
from blade.fallback.attempt import attempt
from blade.fallback.bounds import in_bounds
from blade.reason import Code, Reason, Stage

Beyond = Callable[[int, torch.Tensor, torch.Tensor], str | None]
"""(output, wanted, got) -> ``None`` if that is right all the same, else what there is to add."""

# Error allowed relative to the largest value of an output. Tracing runs the very same kernels; the
# slack is for freezing, which folds batch norms into convolutions. Beyond it, float64 tells (``Exact``).
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


def reference(
    original: Original, sample: Sample, axes: frozenset[Axis], what: str
) -> Reference | None:
    """The reference for ``sample``, ``None`` if the original does not accept it.

    On a GPU it is asked with care (``in_bounds``): ``sample`` need not be the user's.
    """

    def answers() -> list[Answer]:
        if not original.is_stateful:
            once = seeded(lambda: original.run(sample, times=1))
            if not original.is_stateful:  # this run may be the one that shows it
                return once
        return seeded(lambda: original.run(sample, times=2))

    def careful() -> list[Answer]:
        with in_bounds(sample, original.device):
            return answers()

    result = attempt(Stage.CAPTURE, None, what, careful, code=Code.TRACE_FAILED)
    return None if isinstance(result, Reason) else Reference(sample, tuple(result), axes, what)


def find_differences(
    module: torch.jit.ScriptModule,
    references: Sequence[Reference],
    budget: AccuracyBudget | None = None,
    seed: bool = True,
    original: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
) -> list[tuple[Reference, str]]:
    """Every reference that ``module`` does not meet, with a sentence saying how.

    ``budget``: parts of ``module`` are lossy, and this is what its outputs may lose. ``seed``: from the
    references' random seed, which nobody else may use meanwhile; a module that draws no numbers needs none.
    ``original``: what gave ``references``; it is run in float64 if that has to tell. ``forward``: what is called for
    ``module``'s, whose own executor is then not used.
    """
    state, exact = State(module), Exact(original, references, seed)
    run = module if forward is None else forward
    every = ((one, _why_different(run, state, one, budget, seed, exact)) for one in references)
    return [(one, why) for one, why in every if why is not None]


def _why_different(
    module: Callable[..., Any],
    state: State,
    one: Reference,
    budget: AccuracyBudget | None,
    seed: bool,
    exact: Exact,
) -> str | None:
    def answers() -> list[Answer]:
        # Without the profiling executor, which would specialize anew at every size.
        with torch.no_grad(), optimized_execution(False):
            return [answer_of(lambda sample: module(*sample), one.sample) for _ in one.answers]

    result = attempt(
        Stage.CAPTURE,
        None,
        one.what,
        lambda: seeded(answers) if seed else answers(),
        code=Code.TRACE_SPECIALIZED,
    )
    state.restore()
    if isinstance(result, Reason):
        return result.detail
    here = budget if budget is None or not one.axes else budget.scaled(ELSEWHERE)
    for call, ((output, arguments), (actual, left)) in enumerate(zip(one.answers, result)):
        if (
            why := _why_values(output, actual, here, partial(exact.why_not, one, call))
        ) is not None:
            return why
        if (why := _why_values(arguments, left)) is not None:
            return f"arguments were written to differently: {why.replace('output', 'argument')}"
    return None


def _why_values(
    expected: Any,
    actual: Any,
    budget: AccuracyBudget | None = None,
    beyond: Beyond = lambda *_: "",
) -> str | None:
    """``beyond`` is asked of output ``index`` where it is further off than ``_TOLERANCE``."""
    want, got = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(want) != len(got):
        return f"it returned {len(got)} values instead of {len(want)}"
    for index, (x, y) in enumerate(zip(want, got)):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y) or not _is_same_plain(x, y):
                return f"output {index} is {y!r} instead of {x!r}"
            continue
        if (why := _why_tensor(x, y, budget, partial(beyond, index))) is not None:
            return f"output {index} {why}"
    return None


def _is_same_plain(want: Any, got: Any) -> bool:
    """Floats come out of tensors, most often of float32, whatever they are themselves."""
    if isinstance(want, float) and want != got:
        both_nan = want != want and got != got
        return both_nan or math.isclose(want, got, rel_tol=_TOLERANCE[torch.float32])
    return bool(want == got)


def _why_tensor(
    want: torch.Tensor,
    got: torch.Tensor,
    budget: AccuracyBudget | None,
    beyond: Callable[[torch.Tensor, torch.Tensor], str | None],
) -> str | None:
    if want.shape != got.shape:
        return f"has shape {list(got.shape)} instead of {list(want.shape)}"
    if want.dtype != got.dtype:
        return f"has dtype {got.dtype} instead of {want.dtype}"
    if want.numel() == 0 or torch.equal(want, got):
        return None
    if budget is not None:
        error = output_error(got, want)
        seen = f"has a relative error of {error.relative:.2g} (cosine {error.cosine:.4f})"
        return None if budget.allows(error) else f"{seen}; allowed is {budget}"
    if want.dtype not in _TOLERANCE:
        return "has other values"
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return "has infinities or NaNs in other places"
    wide = torch.complex128 if want.is_complex() else torch.float64
    expected, actual = want.to(wide)[finite], got.to(wide)[finite]
    if expected.numel() == 0:
        return None
    off = float((expected - actual).abs().max())
    allowed = _TOLERANCE[want.dtype] * float(expected.abs().max())
    if off <= allowed or (further := beyond(want, got)) is None:
        return None
    return f"is off by up to {off:.3g}; {allowed:.3g} is allowed{further}"

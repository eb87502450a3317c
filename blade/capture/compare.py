# SPDX-License-Identifier: Apache-2.0
"""Whether a captured module computes what the original does, and where it does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.capture.inputs import Sample
from blade.capture.original import MODEL_ERRORS, Original, State, copy_of, seeded

# Error allowed relative to the largest value of an output. Tracing runs the very same kernels; the
# slack is for freezing, which folds batch norms into convolutions.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


@dataclass(frozen=True)
class Reference:
    """What the original answered to ``sample``: one output per call, two if calls change its state."""

    sample: Sample
    expected: tuple[Any, ...]
    axes: frozenset[tuple[int, int]] = frozenset()  # (leaf, axis) resized; empty: a sample's sizes
    what: str = "the sample"


def reference(original: Original, sample: Sample, **about: Any) -> Reference | None:
    """The reference for ``sample``, ``None`` if the original does not accept it."""
    try:
        once = seeded(lambda: original.run(sample, times=1))
        if original.is_stateful:
            once = seeded(lambda: original.run(sample, times=2))
    except MODEL_ERRORS:
        return None
    return Reference(sample, tuple(once), **about)


def why_different(
    module: Callable[..., Any], state: State, references: Sequence[Reference]
) -> list[tuple[Reference, str]]:
    """Every reference ``module`` does not meet, with a sentence saying how."""
    found = []
    for one in references:
        if (why := _why_one(module, state, one)) is not None:
            found.append((one, why))
    return found


def _why_one(module: Callable[..., Any], state: State, one: Reference) -> str | None:
    def calls() -> list[Any]:
        with torch.no_grad():
            return [copy_of(module(*copy_of(one.sample))) for _ in one.expected]

    try:
        actual = seeded(calls)
    except MODEL_ERRORS as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"it raised {type(error).__name__} ({lines[-1] if lines else ''})"
    finally:
        state.restore()
    for expected_one, actual_one in zip(one.expected, actual):
        if (why := _why_values(expected_one, actual_one)) is not None:
            return why
    return None


def _why_values(expected: Any, actual: Any) -> str | None:
    want, got = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(want) != len(got):
        return f"it returned {len(got)} values instead of {len(want)}"
    for index, (x, y) in enumerate(zip(want, got)):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y) or x != y:
                return f"output {index} is {y!r} instead of {x!r}"
            continue
        if (why := _why_tensor(x, y)) is not None:
            return f"output {index} {why}"
    return None


def _why_tensor(want: torch.Tensor, got: torch.Tensor) -> str | None:
    if want.shape != got.shape:
        return f"has shape {list(got.shape)} instead of {list(want.shape)}"
    if want.dtype != got.dtype:
        return f"has dtype {got.dtype} instead of {want.dtype}"
    if want.numel() == 0 or torch.equal(want, got):
        return None
    if want.dtype not in _TOLERANCE:
        return "has other values"
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return "has infinities or NaNs in other places"
    wide = torch.complex128 if want.is_complex() else torch.float64
    error = (want.to(wide) - got.to(wide))[finite].abs()
    allowed = (
        _TOLERANCE[want.dtype] * max(float(want.to(wide)[finite].abs().max()), 1e-30)
        if error.numel()
        else 0.0
    )
    if error.numel() and float(error.max()) > allowed:
        return f"is off by up to {float(error.max()):.3g}, {allowed:.3g} is allowed"
    return None

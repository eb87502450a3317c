# SPDX-License-Identifier: Apache-2.0
"""The user's model in float64: how exact the model itself is, which bounds how far another result may be.

    exact = Exact(original, references)
    exact.why_not(reference, 0, 2, want, got)       # None: output 2 of the first call is as exact as the original's

What 16 bits lose, or a GPU's products of 32 bits in TF32, grows with a model's depth: two right results of a deep
model may be further apart than any fixed tolerance. So where they are, both are compared with float64, as every
cluster's results are: an error of twice the original's own, and rounding, is right.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.capture.captured import Reference
from blade.capture.original import Original
from blade.fallback.attempt import attempt
from blade.fallback.compare import (
    FP32_NO_TRUTH,
    NO_TRUTH,
    allowed,
    distance,
    is_rounding,
    known_truth,
)
from blade.graph.leaves import tensors_in
from blade.reason import Code, Reason, Stage

_SAME = 1e-6  # two runs in float64 that differ by more have drawn different numbers

Leaves = list[list[Any]]  # of each call


class Exact:
    """Asked for the first time, the model is copied, widened and run at that reference.

    ``seed``: whether the random generators may be used, so that a model that draws numbers is known as one.
    """

    def __init__(
        self,
        original: Callable[..., Any] | None,
        references: Sequence[Reference],
        seed: bool = True,
    ) -> None:
        self._original = original if isinstance(original, Original) else None
        self._references = references
        self._seed = seed
        self._wide: Original | None = None
        self._found: dict[int, Leaves | None] = {}

    def why_not(
        self, one: Reference, call: int, output: int, want: torch.Tensor, got: torch.Tensor
    ) -> str | None:
        """Why ``got`` is not right, by a run in float64; "" where there is none to tell.

        What is as near to that as can be is right, however far the original is; where all of the original's answer
        is rounding (``is_rounding``), what is about as near.
        """
        own = self._own(one, call, output, want)
        if own is None:
            truth = self._truth(one, call, output)
            if truth is None or truth.shape != want.shape:
                return ""
            far = distance(want, truth) if is_rounding(want, truth) else 0.0
            return "" if self._over(one, call, output, want, got, far) else None
        if self._over(one, call, output, want, got, own) is None:
            return None
        # small by luck: what the original's error is elsewhere counts
        others = [self._own_of(other, call, output) for other in self._references]
        own = max(own, median([e for e in others if e is not None]))
        seen = self._over(one, call, output, want, got, own)
        if seen is None:
            return None
        return (
            f"; relative to the largest value it is {seen:.1e} from a run in float64; the original is "
            f"{own:.1e} from it, which allows {allowed(want.dtype, own):.1e}"
        )

    def _over(
        self,
        one: Reference,
        call: int,
        output: int,
        want: torch.Tensor,
        got: torch.Tensor,
        own: float,
    ) -> float | None:
        """The error of ``got`` if it is more than an original with the error ``own`` allows."""
        truth = self._truth(one, call, output)
        assert truth is not None
        seen = distance(got, known_truth(truth, want))
        return None if seen <= allowed(got.dtype, own) else seen

    def _own_of(self, one: Reference, call: int, output: int) -> float | None:
        if call >= len(one.answers):
            return None
        leaves = pytree.tree_leaves(one.answers[call][0])
        want = leaves[output] if output < len(leaves) else None
        return self._own(one, call, output, want) if isinstance(want, torch.Tensor) else None

    def _own(self, one: Reference, call: int, output: int, want: torch.Tensor) -> float | None:
        """The original's error; ``None`` if there is no truth to know it by."""
        truth = self._truth(one, call, output)
        limit = FP32_NO_TRUTH if want.dtype == torch.float32 else NO_TRUTH.get(want.dtype)
        if truth is None or truth.shape != want.shape or limit is None:
            return None
        own = distance(want, known_truth(truth, want))
        return own if own <= limit else None

    def _truth(self, one: Reference, call: int, output: int) -> torch.Tensor | None:
        if id(one) not in self._found:
            found = attempt(
                Stage.VERIFY, None, one.what, lambda: self._run(one), code=Code.WRONG_VALUES
            )
            self._found[id(one)] = None if isinstance(found, Reason) else found
        calls = self._found[id(one)]
        if calls is None or output >= len(calls[call]):
            return None
        leaf = calls[call][output]
        return leaf if isinstance(leaf, torch.Tensor) else None

    def _run(self, one: Reference) -> Leaves | None:
        """What the wide model returns; nothing if that depends on numbers it draws."""
        if self._original is None:
            return None
        self._wide = self._wide or self._original.in_fp64()
        if not self._seed:
            return self._answers(one)
        first, second = (self._seeded(one, seed) for seed in (0, 1))
        for a, b in zip(tensors_in(first), tensors_in(second), strict=True):
            if a.shape != b.shape or not distance(a, b) <= _SAME:
                return None
        return first

    def _seeded(self, one: Reference, seed: int) -> Leaves:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            return self._answers(one)

    def _answers(self, one: Reference) -> Leaves:
        assert self._wide is not None
        answers = self._wide.run(widened(one.sample), times=len(one.answers))
        return [pytree.tree_leaves(output) for output, _ in answers]


def widened(value: Any) -> Any:
    """``value`` with every tensor of floats in it in float64."""
    return pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value
    )

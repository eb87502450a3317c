# SPDX-License-Identifier: Apache-2.0
"""The user's model in float64, which tells the model's own error and so bounds the error of a captured graph.

    exact = Fp64Model(original, references)
    exact.why_not(reference, 0, 2, want, got)       # None: output 2 of call 0 is as exact as the original's

The errors of 16-bit arithmetic, or of 32-bit products in TF32 on a GPU, grow with a model's depth: two right
results of a deep model may differ by more than any fixed tolerance. Then both are compared with float64, as
the results of clusters are: an error of at most twice the original's own, plus rounding, is right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.capture.reference_model import ReferenceModel
from blade.core.attempt import attempt
from blade.core.captured import Reference
from blade.core.pytree import tensors_in
from blade.core.reason import Code, Reason, Stage
from blade.process.torch_state import seeded_generators
from blade.verification.tolerance import (
    SAME_RUN,
    allowed,
    distance,
    excess_error,
    is_rounding,
    own_error,
    usual_error,
)

Leaves = list[list[Any]]  # outputs of each call


class Fp64Model:
    """The float64 model: on first use it is copied, widened and run at that reference.

    ``seed``: whether the random generators may be used, to detect a model that draws numbers.
    """

    def __init__(
        self,
        original: Callable[..., Any] | None,
        references: Sequence[Reference],
        seed: bool = True,
    ) -> None:
        self._original = original if isinstance(original, ReferenceModel) else None
        self._references = references
        self._seed = seed
        self._wide: ReferenceModel | None = None
        self._found: dict[int, Leaves | None] = {}

    def why_not(
        self, one: Reference, call: int, output: int, want: torch.Tensor, got: torch.Tensor
    ) -> str | None:
        """Return why ``got`` is wrong by a float64 run, ``None`` if it is right; "" without a float64 run.

        A result as near to float64 as its dtype permits is right, however far the original is. Where the
        original's output is pure rounding (``is_rounding``), so is a result about as near.
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
        # small by chance: use the original's error elsewhere
        others = [self._own_of(other, call, output) for other in self._references]
        own = max(own, usual_error(others))
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
        """Return the error of ``got`` if it exceeds what an original with the error ``own`` allows."""
        truth = self._truth(one, call, output)
        assert truth is not None
        return excess_error(got, want, truth, own)

    def _own_of(self, one: Reference, call: int, output: int) -> float | None:
        if call >= len(one.answers):
            return None
        leaves = pytree.tree_leaves(one.answers[call][0])
        want = leaves[output] if output < len(leaves) else None
        return self._own(one, call, output, want) if isinstance(want, torch.Tensor) else None

    def _own(self, one: Reference, call: int, output: int, want: torch.Tensor) -> float | None:
        """Return the original's error; ``None`` without a usable float64 run."""
        return own_error(want, self._truth(one, call, output))

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
        """Return the outputs of the float64 model; ``None`` if they depend on numbers that it draws."""
        if self._original is None:
            return None
        self._wide = self._wide or self._original.in_fp64()
        if not self._seed:
            return self._answers(one)
        first, second = (self._seeded(one, seed) for seed in (0, 1))
        for a, b in zip(tensors_in(first), tensors_in(second), strict=True):
            if a.shape != b.shape or not distance(a, b) <= SAME_RUN:
                return None
        return first

    def _seeded(self, one: Reference, seed: int) -> Leaves:
        with seeded_generators(seed):
            return self._answers(one)

    def _answers(self, one: Reference) -> Leaves:
        assert self._wide is not None
        answers = self._wide.run(widened(one.sample), times=len(one.answers))
        return [pytree.tree_leaves(output) for output, _ in answers]


def widened(value: Any) -> Any:
    """Return ``value`` with every float tensor in it in float64."""
    return pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value
    )

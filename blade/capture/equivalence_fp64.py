# SPDX-License-Identifier: Apache-2.0
"""The user's model in float64, which tells the model's own error and so bounds the error of a captured graph.

    exact = Fp64Model(original, references)
    exact.why_not(reference, 0, 2, want, got)       # None: output 2 of call 0 is as exact as the original's

The errors of 16-bit arithmetic, or of 32-bit products in TF32 on a GPU, grow with a model's depth: two right
results of a deep model may differ by more than any fixed tolerance. Then both are compared with float64, as
the results of clusters are: an error of at most twice the original's own, plus rounding, is right.

Weights that take more than ``KEPT`` bytes in float64 are widened at use (``wide_at_use``), and of outputs no
more are kept than that, and the latest: only the original's errors are needed later.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.capture.reference_model import ReferenceModel
from blade.core.attempt import attempt
from blade.core.captured import Reference
from blade.core.pytree import tensors_in
from blade.core.reason import Code, Reason, Stage
from blade.process.torch_state import seeded_generators
from blade.verification.draws import Draws
from blade.verification.grouped_products import GroupedProducts
from blade.verification.tolerance import (
    FEW,
    SAME_RUN,
    allowed,
    distance,
    excess_error,
    is_rounding,
    magnitude,
    own_error,
    usual_error,
)
from blade.verification.wide_at_use import attention_in_parts, wide_bytes

KEPT = 256 << 20  # bytes of weights, and of outputs
Leaves = list[list[Any]]  # outputs of each call


class Fp64Model:
    """The float64 model: on first use it is made and run at that reference.

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
        self._in_parts = False
        self._found: dict[int, Leaves | None] = {}
        self._errors: dict[tuple[int, int, int], float | None] = {}

    def why_not(
        self, one: Reference, call: int, output: int, want: torch.Tensor, got: torch.Tensor
    ) -> str | None:
        """Return why ``got`` is wrong by a float64 run, ``None`` if it is right; "" without a float64 run.

        A result as near to float64 as its dtype permits is right, however far the original is. Where the
        original's output is pure rounding (``is_rounding``), so is a result about as near.
        """
        want, got = self._as_computed(want), self._as_computed(got)
        truth = self._truth(one, call, output)
        own = self._own(one, call, output, want)
        if own is None:
            if truth is None or truth.shape != want.shape:
                return ""
            far = distance(want, truth) if is_rounding(want, truth) else 0.0
            return "" if excess_error(got, want, truth, far) else None
        assert truth is not None
        part = self._part(call, output, want)
        if excess_error(got, want, truth, own, part) is None:
            return None
        # small by chance: use the original's error elsewhere
        others = [self._own_of(other, call, output) for other in self._references]
        own = max(own, usual_error(others))
        seen = excess_error(got, want, truth, own, part)
        if seen is None:
            return None
        return (
            f"; relative to the largest value it is {seen:.1e} from a run in float64; the original is "
            f"{own:.1e} from it, which allows {allowed(want.dtype, own):.1e}"
        )

    def _part(self, call: int, output: int, want: torch.Tensor) -> float:
        """The magnitude of an output of few elements over its usual one; at most 1.

        It may be small by chance, a sum that nearly cancels out: errors are relative to the usual one.
        """
        if want.numel() > FEW or not want.is_floating_point():
            return 1.0
        leaves = [self._want(other, call, output) for other in self._references]
        usual = median(magnitude(leaf) for leaf in leaves if leaf is not None)
        return min(1.0, magnitude(want) / usual) if usual else 1.0

    def _want(self, one: Reference, call: int, output: int) -> torch.Tensor | None:
        if call >= len(one.answers):
            return None
        leaves = pytree.tree_leaves(one.answers[call][0])
        leaf = leaves[output] if output < len(leaves) else None
        return self._as_computed(leaf) if isinstance(leaf, torch.Tensor) else None

    def _as_computed(self, result: torch.Tensor) -> torch.Tensor:
        """A float64 result of a model in float32 has float32's digits."""
        return result.float() if result.dtype is torch.float64 and self._is_float32 else result

    @cached_property
    def _is_float32(self) -> bool:
        """Whether all floats that the model is given, weights and inputs, are float32."""
        if self._original is None:
            return False
        given = [*self._original.tensors(), *tensors_in(list(self._references[0].sample))]
        return {t.dtype for t in given if t.is_floating_point()} == {torch.float32}

    def _own_of(self, one: Reference, call: int, output: int) -> float | None:
        want = self._want(one, call, output)
        return None if want is None else self._own(one, call, output, want)

    def _own(self, one: Reference, call: int, output: int, want: torch.Tensor) -> float | None:
        """Return the original's error; ``None`` without a usable float64 run."""
        key = id(one), call, output
        if key not in self._errors:
            truth = self._truth(one, call, output)
            self._errors[key] = own_error(want, truth, self._part(call, output, want))
        return self._errors[key]

    def _truth(self, one: Reference, call: int, output: int) -> torch.Tensor | None:
        calls = self._leaves_of(one)
        if calls is None or output >= len(calls[call]):
            return None
        leaf = calls[call][output]
        return leaf if isinstance(leaf, torch.Tensor) else None

    def _leaves_of(self, one: Reference) -> Leaves | None:
        """Return the outputs of the float64 model; the latest ones are kept, up to ``KEPT`` bytes."""
        if id(one) in self._found:
            return self._found[id(one)]
        found = attempt(
            Stage.VERIFY, None, one.what, lambda: self._run(one), code=Code.WRONG_VALUES
        )
        calls = None if isinstance(found, Reason) else found
        if calls is not None:
            self._note_errors(one, calls)
        while self._found and _bytes_of([calls, *self._found.values()]) > KEPT:
            del self._found[next(iter(self._found))]
        self._found[id(one)] = calls
        return calls

    def _note_errors(self, one: Reference, calls: Leaves) -> None:
        """Note the original's errors, so that they do not take another run."""
        for call, ((answer, _), truths) in enumerate(zip(one.answers, calls, strict=True)):
            leaves = pytree.tree_leaves(answer)
            for output, (want, truth) in enumerate(zip(leaves, truths, strict=False)):
                if isinstance(want, torch.Tensor) and isinstance(truth, torch.Tensor):
                    part = self._part(call, output, want)
                    self._errors[id(one), call, output] = own_error(want, truth, part)

    def _run(self, one: Reference) -> Leaves | None:
        """Return the outputs of the float64 model; ``None`` if they depend on numbers that it draws."""
        if self._original is None:
            return None
        if self._wide is None:
            return self._run_first(self._original, one)
        return self._outputs(self._wide, one)

    def _run_first(self, original: ReferenceModel, one: Reference) -> Leaves | None:
        """``_run`` of a new float64 model: a copy of small weights, or of those that may not be widened at use."""
        if sum(map(wide_bytes, original.tensors())) > KEPT:
            self._wide, self._in_parts = original.in_fp64(at_use=True), True
            run = partial(self._outputs, self._wide, one)
            found = attempt(Stage.VERIFY, None, one.what, run, code=Code.WRONG_VALUES)
            if not isinstance(found, Reason):
                return found
        self._wide, self._in_parts = original.in_fp64(), False
        return self._outputs(self._wide, one)

    def _outputs(self, wide: ReferenceModel, one: Reference) -> Leaves | None:
        if self._in_parts:
            with attention_in_parts(), Draws() as draws:
                first = self._seeded(wide, one, 0)
            if not self._seed or (not draws.seen and _bytes_of(first) > KEPT):
                return first  # a second run's would take as much again
        else:
            first = self._seeded(wide, one, 0)
        if not self._seed:
            return first
        with attention_in_parts() if self._in_parts else nullcontext():
            second = self._seeded(wide, one, 1)
        return first if _is_same_run(first, second) else None

    def _seeded(self, wide: ReferenceModel, one: Reference, seed: int) -> Leaves:
        with seeded_generators(seed) if self._seed else nullcontext(), GroupedProducts():
            answers = wide.run(widened(one.sample), times=len(one.answers))
        return [pytree.tree_leaves(output) for output, _ in answers]


def _is_same_run(first: Leaves, second: Leaves) -> bool:
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return all(a.shape == b.shape and distance(a, b) <= SAME_RUN for a, b in pairs)


def _bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def widened(value: Any) -> Any:
    """Return ``value`` with every float tensor in it in float64."""
    return pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value
    )

# SPDX-License-Identifier: Apache-2.0
"""What an engine answered at a case, measured, and whether that is near enough.

    check_errors(answers, answers_at, moves_at)      # raises Refused(WRONG_VALUES) where it is not

The original's own error at one case may be small by luck (few elements): where it is below the median over all
cases, that median is what twice is allowed of, and an error beyond that is looked at with other contents before
it counts. What is small is held to the median over the other outputs of its case, too: in training there are no
other cases. What is drawn again tells of all outputs in doubt: engine, original and fp64 run once per draw.
At contents that were made up, an error is also right that a rounding of the inputs makes in the original.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from blade.errors import Refused
from blade.fallback import compare
from blade.fallback.cases import Case
from blade.fallback.conditioning import may_be_ill_conditioned
from blade.fallback.redraw import MOST, is_luck, redrawn
from blade.reason import Code
from blade.report import shape_text


@dataclass(frozen=True)
class Answer:
    """One output of the engine at one case, measured."""

    case: Case
    output: int
    dtype: torch.dtype
    errors: compare.Errors
    is_near: bool = False  # so near to the original that fp64 was not asked
    is_small: bool = False  # of so few elements that all of them may be exact by luck
    half: torch.dtype | None = None  # that it was computed in, in part


@dataclass(frozen=True)
class _Doubt:
    """An answer that is ``ratio`` > 1 times the allowed error off; ``usual`` is the original's own error."""

    answer: Answer
    usual: float
    ratio: float

    def may_be_luck(self) -> bool:
        return self.answer.errors.original_fp64 is not None and self.ratio <= MOST

    def refusal(self) -> Refused:
        return Refused(
            Code.WRONG_VALUES, f"at {at(self.answer.case)} {_sentence(self.answer, self.usual)}"
        )


AnswersAt = Callable[[Case, Sequence[int]], Sequence[Answer] | None]
"""These outputs at a case; ``None`` if the engine or the original does not answer there."""
MovesAt = Callable[[Case, Sequence[int]], Sequence[float]]
"""How far these outputs of the original move, relative to their magnitude, when a case's floats do by a rounding."""


def check_errors(answers: Sequence[Answer], answers_at: AnswersAt, moves_at: MovesAt) -> None:
    """Each error against what is allowed there; raises ``Refused``."""
    doubts: dict[str, list[_Doubt]] = {}
    for one in answers:
        if one.is_near:
            continue
        peers = [
            a.errors.original_fp64
            for a in answers
            if a.output == one.output or (one.is_small and a.case is one.case)
        ]
        usual = median([p for p in peers if p is not None] or [0.0])
        doubt = _Doubt(one, usual, _over(one, usual))
        if doubt.ratio <= 1:
            continue
        if not (doubt.may_be_luck() or may_be_ill_conditioned(one.case)):
            raise doubt.refusal()
        doubts.setdefault(one.case.name, []).append(doubt)
    for several in doubts.values():
        _look_again(several, answers_at, moves_at)


def _look_again(doubts: Sequence[_Doubt], answers_at: AnswersAt, moves_at: MovesAt) -> None:
    """At other draws of the one case of ``doubts``, and at what is all but the same."""
    case = doubts[0].answer.case
    lucky = [doubt for doubt in doubts if doubt.may_be_luck()]
    outputs = [doubt.answer.output for doubt in lucky]
    seen = [answers_at(other, outputs) for other in redrawn(case)] if lucky else []
    wrong = [doubt for doubt in doubts if not doubt.may_be_luck()]
    for k, doubt in enumerate(lucky):
        again = [None if answers is None else _over(answers[k], doubt.usual) for answers in seen]
        if not is_luck(doubt.ratio, again):
            wrong.append(doubt)
    if not wrong:
        return
    if not may_be_ill_conditioned(case):
        raise wrong[0].refusal()
    moves = moves_at(case, [doubt.answer.output for doubt in wrong])
    for doubt, moved in zip(wrong, moves, strict=True):
        if not _bound(doubt.answer, doubt.usual)[0] <= 2 * moved:
            raise doubt.refusal()


def _over(one: Answer, usual: float) -> float:
    """The error over the allowed one; infinite where none is allowed and there is one."""
    seen, limit, _ = _bound(one, usual)
    return seen / limit if limit else (float("inf") if seen else 0.0)


def _bound(one: Answer, usual: float) -> tuple[float, float, float | None]:
    """The error, what is allowed, and the original's own if that is known (``usual``: at other cases)."""
    own = one.errors.original_fp64
    if own is None:
        dtype = one.dtype if one.half is None or not one.dtype.is_floating_point else one.half
        return one.errors.error, compare.allowed(dtype, None), None
    assert one.errors.error_fp64 is not None
    own = max(own, usual)
    return one.errors.error_fp64, compare.allowed(one.dtype, own), own


def _sentence(one: Answer, usual: float) -> str:
    seen, limit, own = _bound(one, usual)
    return (
        f"output {one.output} is {seen:.1e} from {'the original' if own is None else 'an fp64 run'} (relative "
        f"to its largest magnitude); {limit:.1e} is allowed, the original's own error being "
        f"{'unknown' if own is None else f'{own:.1e}'}."
    )


def at(case: Case) -> str:
    """``case`` in a sentence."""
    return f"{case.name} ({shape_text(t.shape for t in case.inputs)})"

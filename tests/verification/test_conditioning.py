# SPDX-License-Identifier: Apache-2.0
"""Where the last bit of an input decides about the answer, an engine may round as it likes; nowhere else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_backends import wrong_values
from verified import cluster, run

from blade.core.reason import Reason
from blade.errors import Refused
from blade.report import Verdict
from blade.verification.cases import Case
from blade.verification.check_errors import Answer, check_errors
from blade.verification.conditioning import DRAWS, perturbation_sensitivity
from blade.verification.tolerance import RelativeErrors

aten = torch.ops.aten


class Choice(torch.nn.Module):
    """Of large contents alone, a softmax between two scores that are the same but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        key = torch.randn(64, 1, generator=rng)
        self.const_0 = torch.cat([key, key[torch.randperm(64, generator=rng)]], 1)
        self.const_1 = torch.tensor([[1.0], [2.0]])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        beyond = aten.relu.default(aten.sub.Scalar(aten.amax.default(x, [-1], True), 10.0))
        even = aten.expand.default(aten.mean.dim(x, [-1], True), [-1, 64])
        scores = aten.mul.Tensor(aten.matmul.default(even, self.const_0), beyond)
        chosen = aten.softmax.int(aten.mul.Scalar(scores, 1e6), -1)
        return (aten.matmul.default(chosen, self.const_1),)


def summed_backwards(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    own, x = Choice(), inputs[0]
    even = x.mean(-1, True).expand(-1, 64)
    scores = (even.double() @ own.const_0.double()).float() * (x.amax(-1, True) - 10).relu()
    return [(scores * 1e6).softmax(-1) @ own.const_1]


def test_a_choice_that_rounding_decides_is_no_fault_where_contents_were_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = cluster(Choice(), [torch.rand(3, 8, generator=torch.Generator().manual_seed(4))])
    assert isinstance(run(of, run=summed_backwards), Verdict)
    assert isinstance(run(of, run=wrong_values), Reason)
    monkeypatch.setattr("blade.verification.conditioning.DRAWS", 0)
    wrong = run(of, run=summed_backwards)
    assert isinstance(wrong, Reason)
    assert "at large contents (3x8) output 0 is" in wrong.detail


def test_where_16_bits_amplify_rounding_it_bounds_the_error_at_the_users_own() -> None:
    case = Case("sample", "sample 0", (torch.ones(2),))
    far = RelativeErrors(0.3, None, None, is_amplified=True)
    one = Answer(case, 0, torch.bfloat16, far, half=torch.bfloat16)

    def never(*args: Any) -> None:
        raise AssertionError("nothing is drawn")

    check_errors([one], never, lambda *_: [0.15])
    for other, moved in (
        (one, 0.14),
        (replace(one, half=None, dtype=torch.float32), 0.15),
        (replace(one, errors=replace(far, is_amplified=False)), 0.15),
    ):
        with pytest.raises(Refused):
            check_errors([other], never, lambda *_, moved=moved: [moved])


def test_in_16_bits_the_original_itself_must_move_by_as_much_at_the_users_own() -> None:
    """Of hundreds of gradients, in float32 of products in bfloat16, one is 2.2 times as far as eager by its nature."""
    case = Case("sample", "sample 0", (torch.ones(2),))
    one = Answer(case, 0, torch.float32, RelativeErrors(2e-3, 2.2e-3, 1e-3), half=torch.bfloat16)

    def check(answer: Answer, moved: float) -> None:
        check_errors([answer], lambda case, outputs, finite: [answer], lambda *_: [moved])

    check(one, 2.2e-3)
    far = replace(one, errors=RelativeErrors(9e-3, 9e-3, 1e-3))
    for other, moved in ((one, 2.1e-3), (replace(one, half=None), 1.0), (far, 1.0)):
        with pytest.raises(Refused):
            check(other, moved)


def test_roundings_are_drawn_until_one_moves_the_original_as_far() -> None:
    case = Case("sample", "sample 0", (torch.ones(2),))
    drawn: list[int] = []

    def rounded(_: Case, seed: int) -> list[torch.Tensor]:
        drawn.append(seed)
        return [torch.tensor([1.0, 1.0 + 0.01 * seed])]

    def moves(enough: float) -> float:
        drawn.clear()
        return perturbation_sensitivity(lambda _: [torch.ones(2)], rounded, case, [0], [enough])[0]

    assert moves(0.025) == pytest.approx(0.03) and drawn == [0, 1, 2, 3]
    assert moves(0.5) == pytest.approx(0.01 * (DRAWS - 1)) and len(drawn) == DRAWS

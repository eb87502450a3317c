# SPDX-License-Identifier: Apache-2.0
"""Cases drawn again: which inputs change, and what is in doubt after the small ones did."""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from fake_backends import Fault, PythonEngine
from verified import cluster

from blade.core.reason import Reason
from blade.report import Verdict
from blade.verification.cases import Case
from blade.verification.resample import changed_inputs, resampled
from blade.verification.verify import verify

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blade.verification.resample._SMALL", 64)


def case(*inputs: torch.Tensor) -> Case:
    return Case("sample", "sample 0", inputs)


def test_the_smallest_inputs_come_first() -> None:
    large, small, ints = torch.randn(64), torch.randn(4), torch.arange(3)
    assert [set(which) for which in changed_inputs(case(large, small, ints))] == [{1, 2}, {0, 1, 2}]


def test_a_quarter_of_all_bytes_counts_as_small() -> None:
    inputs = (torch.randn(64), torch.randn(256))
    assert [set(which) for which in changed_inputs(case(*inputs))] == [{0}, {0, 1}]


@pytest.mark.parametrize(
    "inputs", [(torch.randn(4), torch.randn(8)), (torch.arange(2), torch.randn(64))]
)
def test_few_bytes_or_no_floats_among_them_are_changed_with_all(
    inputs: tuple[torch.Tensor, ...],
) -> None:
    assert [set(which) for which in changed_inputs(case(*inputs))] == [{0, 1}]


def test_what_is_not_changed_is_not_copied() -> None:
    large, small = torch.randn(64), torch.randn(4)
    made = [make() for pair in resampled(case(large, small), [1]) for make in pair]
    assert len(made) == 4
    assert all(one.inputs[0] is large and one.inputs[1] is not small for one in made)


class Dots(torch.nn.Module):
    """Sums of 4,096 products; of one row, how exact they come out is luck."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.mul.Tensor(aten.sum.dim_IntList(aten.mul.Tensor(x, y), [-1]), scale),)


def in_another_order(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int
) -> list[torch.Tensor]:
    x, y, scale = inputs
    return [(x * y).unflatten(-1, (64, 64)).sum(-2).sum(-1) * scale]


def a_little_off(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int
) -> list[torch.Tensor]:
    return [o * (1 + 3e-6) for o in outputs]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs were changed, each time that a case was drawn again."""
    found: list[int] = []

    def seen(case: Case, which: Collection[int]) -> object:
        found.append(len(which))
        return resampled(case, which)

    monkeypatch.setattr("blade.verification.check_errors.resampled", seen)
    return found


def verdict(seed: int, fault: Fault) -> Verdict | Reason:
    """Only ``scale`` is small; the luck is in the others."""
    rng = torch.Generator().manual_seed(seed)
    sample = (torch.randn(1, 4096, generator=rng), torch.randn(4096, generator=rng), torch.ones(1))
    of = replace(cluster(Dots(), sample[:1]), samples=[sample])
    return verify(of, PythonEngine(of.gm, run=fault), of.gm, "fake", derived=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [6, 10, 46])
def test_doubts_that_small_inputs_do_not_settle_are_drawn_with_all(
    seed: int, changed: list[int]
) -> None:
    assert isinstance(verdict(seed, in_another_order), Verdict)
    assert changed == [1, 3]


def test_what_is_wrong_in_every_draw_is_refused(changed: list[int]) -> None:
    assert isinstance(verdict(46, a_little_off), Reason)
    assert changed == [1, 3]

# SPDX-License-Identifier: Apache-2.0
"""Accuracy budgets: how they are written, what they allow, and the error they are about."""

from math import inf, isclose, log10, sqrt
from typing import Any

import pytest
import torch

from blade.config import Config
from blade.config.accuracy import (
    AccuracyBudget,
    OutputError,
    output_error,
    parse,
    worst,
)
from blade.errors import ConfigError

RNG = torch.Generator().manual_seed(0)


def mean(outputs: Any, labels: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("value", "kind", "bound"),
    [
        (0.05, "relative", 0.05),
        ({"cosine": 0.99}, "cosine", 0.99),
        ({"snr_db": 30}, "snr_db", 30.0),
        ({"metric": mean, "samples": [(torch.ones(2), 1)], "drop": 0.01}, "metric", 0.01),
    ],
)
def test_every_form(value: object, kind: str, bound: float) -> None:
    budget = Config(accuracy_budget=value).accuracy_budget  # type: ignore[arg-type]
    assert (budget.kind, budget.bound) == (kind, bound)
    assert Config().evolve(accuracy_budget=budget).accuracy_budget == budget


@pytest.mark.parametrize(
    "value",
    [0, 1, -0.1, 2.5, "0.1", None, {}, {"cosine": 1.5}, {"snr_db": inf}, {"snr": 30}, True]
    + [{"cosine": 0.9, "snr_db": 30}, {"metric": mean, "samples": [], "drop": 0.1}]
    + [{"metric": mean, "samples": [torch.ones(2)], "drop": 0.1}]
    + [{"metric": 3, "samples": [(1, 2)], "drop": 0.1}]
    + [{"metric": mean, "samples": [(1, 2)], "drop": -1}],
)
def test_anything_else_is_an_error_that_says_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError, match=r"Config\.accuracy_budget=.*: ") as caught:
        Config(accuracy_budget=value)  # type: ignore[arg-type]
    assert any(w in str(caught.value) for w in ("it is", '"samples" is', '"metric" is', '"drop"'))


def test_the_error_is_that_of_the_definition() -> None:
    want = torch.randn(7, 33, generator=RNG)
    got = want + 0.1 * torch.randn(7, 33, generator=RNG)
    error = output_error(got, want)
    noise = sum((a - b) ** 2 for a, b in zip(got.flatten().tolist(), want.flatten().tolist()))
    signal = sum(b**2 for b in want.flatten().tolist())
    assert isclose(error.relative, sqrt(noise / signal), rel_tol=1e-5)
    assert isclose(error.snr_db, -10 * log10(noise / signal), rel_tol=1e-5)
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert isclose(error.cosine, float(cosine), rel_tol=1e-5)


def test_what_is_not_finite_does_not_count() -> None:
    want = torch.tensor([1.0, -torch.inf, 2.0, torch.nan])
    got = torch.tensor([1.1, -torch.inf, 2.0, torch.nan])
    assert isclose(output_error(got, want).relative, 0.1 / sqrt(5), rel_tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_equal_is_exact_and_empty_too(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1]]).to(dtype)
    assert output_error(tensor.clone(), tensor) == OutputError(0.0, 1.0)
    assert output_error(tensor[:0], tensor[:0]) == OutputError(0.0, 1.0)
    assert output_error(tensor, tensor).snr_db == inf


def test_ints_count_by_how_many_differ() -> None:
    want = torch.arange(100)
    got = want.clone()
    got[:4] = -1
    assert output_error(got, want) == OutputError(0.2, 0.96)


def test_something_where_nothing_was_is_infinitely_wrong() -> None:
    error = output_error(torch.ones(3), torch.zeros(3))
    assert error.relative == inf
    assert not any(parse(b).allows(error) for b in (0.5, {"cosine": 0.1}, {"snr_db": -50}))
    assert worst([error]).cosine == -1.0


@pytest.mark.parametrize("value", [0.1, {"cosine": 0.995}, {"snr_db": 20}])
def test_scaling_scales_the_error(value: object) -> None:
    """These three say nearly the same, and still do at half or four times the error."""
    for factor in (1.0, 0.5, 4.0):
        budget = parse(value).scaled(factor)
        for relative, holds in ((0.099 * factor, True), (0.102 * factor, False)):
            assert budget.allows(OutputError(relative, 1 - relative**2 / 2)) is holds


def test_the_worst_is_taken_of_each_number() -> None:
    errors = [OutputError(0.1, 0.99), OutputError(0.2, 0.995)]
    assert worst(errors) == OutputError(0.2, 0.99)
    assert worst([]) == OutputError(0.0, 1.0)


def test_a_budget_says_what_it_is() -> None:
    assert str(parse(0.05)) == "a relative error of at most 0.05"
    assert str(AccuracyBudget("snr_db", 30.0)) == "an SNR in dB of at least 30"

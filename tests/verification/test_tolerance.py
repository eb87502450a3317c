# SPDX-License-Identifier: Apache-2.0
"""tolerance: how errors are measured, and how large they may be."""

import math

import pytest
import torch

from blade.core.dtypes import HALVES
from blade.verification.tolerance import (
    TOLERANCES,
    allowed,
    difference,
    distance,
    errors,
    excess_error,
    own_error,
    tolerance_of,
    usual_error,
)

NAN, INF = math.nan, math.inf


def test_distance_is_relative_to_the_largest_magnitude() -> None:
    want = torch.tensor([100.0, -400.0, 0.0])
    assert distance(torch.tensor([100.0, -400.0, 0.2]), want) == pytest.approx(5e-4)
    assert distance(torch.tensor([0.25]), torch.tensor([0.0])) == 0.25
    assert distance(torch.empty(0), torch.empty(0)) == 0.0


def test_what_underflows_has_no_relative_error() -> None:
    tiny = torch.tensor([3e-41])
    assert distance(1.5 * tiny, tiny) < 1e-40
    assert distance(1.5 * tiny.double(), tiny.double()) == pytest.approx(0.5)
    assert distance(1.5e10 * tiny, 1e10 * tiny) == pytest.approx(0.5)
    half = torch.tensor([2e-3], dtype=torch.float16)
    assert distance(1.5 * half, half) == pytest.approx(0.5, rel=1e-3)


def test_distance_leaves_out_what_is_not_finite() -> None:
    want = torch.tensor([1.0, NAN, INF])
    assert distance(torch.tensor([1.5, NAN, INF]), want) == 0.5
    assert distance(torch.tensor([NAN]), torch.tensor([NAN])) == 0.0


def test_distance_is_computed_wider_than_its_operands() -> None:
    big = torch.tensor([60000.0], dtype=torch.float16)
    assert distance(-big, big) == 2.0  # the difference overflows in fp16


def test_no_error_is_not_negative() -> None:
    zeros = torch.zeros(3)
    assert math.copysign(1.0, errors(zeros, zeros, None).error) == 1.0


def test_errors_against_both() -> None:
    truth = torch.tensor([2.0], dtype=torch.float64)
    one = errors(torch.tensor([2.125]), torch.tensor([2.0625]), truth)
    assert (one.error_fp64, one.original_fp64) == (0.0625, 0.03125)
    assert one.error == pytest.approx(0.0625 / 2.0625)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_ints_and_bools_are_exact(dtype: torch.dtype) -> None:
    want = torch.tensor([0, 1, 1]).to(dtype)
    assert errors(want.clone(), want, None).error == 0.0
    assert errors(1 - want.long(), want.long(), None).error == INF
    assert allowed(dtype, None) == 0.0


def test_what_is_allowed() -> None:
    assert allowed(torch.float32, 3e-6) == pytest.approx(7e-6)
    assert allowed(torch.float32, 0.0) == 1e-6
    assert allowed(torch.float64, 0.0) == 1e-12
    assert allowed(torch.bfloat16, 0.0) == torch.finfo(torch.bfloat16).eps
    assert allowed(torch.float32, None) == 1.3e-6


def test_an_own_error_that_is_unknown_allows_what_torch_testing_does_by_default() -> None:
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float16, 1e-3), (torch.bfloat16, 1.6e-2)):
        assert allowed(dtype, None) == rtol
    assert {allowed(dtype, None) for dtype in (torch.complex64, torch.complex128)} == {1.3e-6}


def test_a_graph_may_be_further_from_its_model_than_an_engine_of_unknown_error() -> None:
    """Freezing folds weights; of a complex128 graph the bound is the narrower one."""
    wider = {dtype for dtype, one in TOLERANCES.items() if one.graph > one.unknown}
    assert wider == {torch.float32, torch.complex64, *HALVES}
    assert TOLERANCES[torch.float64].graph == TOLERANCES[torch.complex128].graph == 1e-9


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_graph_whose_values_have_no_tolerance_has_to_be_equal(dtype: torch.dtype) -> None:
    assert tolerance_of(dtype).graph == 0.0


def test_a_difference_is_absolute() -> None:
    want = torch.tensor([100.0, -400.0, 0.0, NAN, INF])
    got = torch.tensor([100.0, -400.0, 0.25, NAN, INF])
    assert difference(got, want) == (0.25, 400.0)
    assert difference(torch.tensor([1e-5]), torch.tensor([0.0]))[1] == 0.0  # nothing is allowed
    assert difference(torch.tensor([3 + 4j]), torch.tensor([0j])) == (5.0, 0.0)


def test_of_a_models_own_error() -> None:
    truth = torch.tensor([2.0], dtype=torch.float64)
    want = torch.tensor([2.0625])
    assert own_error(want, truth) == 0.03125
    assert own_error(want, None) is None and own_error(want, truth[:0]) is None
    assert own_error(want, 2 * truth) is None  # another function
    assert own_error(want.half(), 1.5 * truth) == 0.3125  # of halves it may be far
    assert own_error(want.double(), truth) is None  # it computes in fp64 itself


def test_an_error_is_in_excess_beyond_twice_the_originals() -> None:
    truth, want = torch.tensor([2.0], dtype=torch.float64), torch.tensor([2.0625])
    assert excess_error(torch.tensor([2.125]), want, truth, 0.03125) is None
    assert excess_error(torch.tensor([2.25]), want, truth, 0.03125) == 0.125


def test_the_usual_error_is_the_median_of_those_known() -> None:
    assert usual_error([None, 0.1, 0.5, 0.2]) == 0.2
    assert usual_error([None]) == 0.0


def test_a_run_in_fp64_that_is_far_from_the_original_is_no_truth() -> None:
    one = errors(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([2.0]).double())
    assert one.error == 1.0 and one.error_fp64 is None and one.original_fp64 is None
    half = errors(
        torch.tensor([1.2]).half(), torch.tensor([1.0]).half(), torch.tensor([1.2]).double()
    )
    assert half.original_fp64 is not None


def test_where_an_fp64_run_has_no_number_the_original_has_to_be_met() -> None:
    want = torch.tensor([1.0, 2.0, INF])
    for truth in ([NAN, NAN, NAN], [1.0, NAN, INF], [NAN, 2.0, INF]):
        wide = torch.tensor(truth).double()
        right, wrong = (errors(torch.tensor([1.0, n, INF]), want, wide) for n in (2.0, 3.0))
        assert right.error_fp64 == 0.0
        assert wrong.error_fp64 == pytest.approx(0.5) and wrong.original_fp64 == 0.0
    over = errors(
        torch.tensor([1.0, INF]), torch.tensor([1.0, INF]), torch.tensor([1.0, 1e300]).double()
    )
    assert over.error_fp64 == 0.0  # what overflows in the original alone is told by its form


def test_what_cancels_out_is_small_beside_the_largest_output() -> None:
    """The gradient of a bias before a softmax is 0: how little the original is off from it is chance."""
    truth, want = torch.full((4,), 1e-18, dtype=torch.float64), torch.full((4,), 1e-7)
    rounding = torch.finfo(torch.float32).eps * 8  # of sums, relative to the largest output
    got = torch.full((4,), 30.0 * rounding)
    assert errors(got, want, truth, scale=1000.0).error == 0.0
    assert errors(got, want, truth, scale=10.0).error > 1.0
    assert errors(got, want, truth + want / 2, scale=1000.0).error > 1.0  # it does not cancel out

# SPDX-License-Identifier: Apache-2.0
"""compare: what counts as the same form, and how errors are measured."""

import math

import pytest
import torch

from blade.fallback.compare import allowed, distance, errors, form

X = torch.arange(6.0).reshape(2, 3) + 1
NAN, INF = math.nan, math.inf


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    out = tensor.clone()
    out[0, 1] = value
    return out


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        ([X], [X, X], "it returned 1 tensors and the original 2"),
        (
            [X.double()],
            [X],
            "output 0 has dtype torch.float64 and the original's has torch.float32",
        ),
        ([X, X.int()], [X, X.long()], "output 1 has dtype torch.int32 and the original's has"),
        ([X[:1]], [X], "output 0 has shape (1, 3) and the original's has (2, 3)"),
        ([X.T.contiguous().T], [X], "output 0 has stride (1, 2) and the original's has (3, 1)"),
        ([_with(X, NAN)], [X], "output 0 differs from the original in 1 places of NaN"),
        ([X], [_with(X, NAN)], "output 0 differs from the original in 1 places of NaN"),
        (
            [_with(X, INF)],
            [_with(X, -INF)],
            "output 0 differs from the original in 1 places of inf",
        ),
        ([_with(X, INF)], [X], "output 0 differs from the original in 1 places of infinity"),
    ],
)
def test_a_different_form_is_told(
    got: list[torch.Tensor], want: list[torch.Tensor], says: str
) -> None:
    sentence = form(got, want)
    assert sentence is not None
    assert sentence.startswith(says)


def test_equal_forms() -> None:
    for same in (X, _with(X, NAN), _with(X, -INF), X.bool(), X[:0], X[0, 0], X.to(torch.cfloat)):
        assert form([same], [same.clone()]) is None
    # The stride of a dimension of size 1 means nothing, nor do those of an empty tensor.
    assert form([torch.empty_strided((1, 3), (7, 1)).fill_(1)], [torch.ones(1, 3)]) is None
    assert form([torch.empty_strided((0, 3), (1, 2))], [torch.empty(0, 3)]) is None


def test_what_an_fp64_run_has_as_well_is_right() -> None:
    for special in (INF, -INF, NAN):
        got, truth = [_with(X, special)], [_with(X.double(), special)]
        for original in (X, _with(X, NAN), _with(X, INF)):
            assert form(got, [original], truths=truth) is None
    assert form([_with(X, INF)], [_with(X, NAN)], truths=[X.double()]) is not None
    assert form([_with(X, INF)], [_with(X, NAN)], truths=[_with(X.double(), -INF)]) is not None
    assert form([X], [_with(X, NAN)], truths=[X.double()]) is None
    assert form([X], [_with(X, NAN)], truths=[2 * X.double()]) is not None
    assert form([X], [_with(X, NAN)], truths=[_with(X.double(), INF)]) is not None


def test_strides_can_be_left_out() -> None:
    assert form([X.T.contiguous().T], [X], strides=False) is None
    assert form([X.double()], [X], strides=False) is not None


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

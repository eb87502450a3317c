# SPDX-License-Identifier: Apache-2.0
"""compare: what counts as the same form."""

import math

import pytest
import torch

from blade.verification.compare import why_other_form

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
    sentence = why_other_form(got, want)
    assert sentence is not None
    assert sentence.startswith(says)


def test_equal_forms() -> None:
    for same in (X, _with(X, NAN), _with(X, -INF), X.bool(), X[:0], X[0, 0], X.to(torch.cfloat)):
        assert why_other_form([same], [same.clone()]) is None
    # The stride of a dimension of size 1 means nothing, nor do those of an empty tensor.
    assert (
        why_other_form([torch.empty_strided((1, 3), (7, 1)).fill_(1)], [torch.ones(1, 3)]) is None
    )
    assert why_other_form([torch.empty_strided((0, 3), (1, 2))], [torch.empty(0, 3)]) is None


def test_what_an_fp64_run_has_as_well_is_right() -> None:
    for special in (INF, -INF, NAN):
        got, truth = [_with(X, special)], [_with(X.double(), special)]
        for original in (X, _with(X, NAN), _with(X, INF)):
            assert why_other_form(got, [original], truths=truth) is None
    assert why_other_form([_with(X, INF)], [_with(X, NAN)], truths=[X.double()]) is not None
    assert (
        why_other_form([_with(X, INF)], [_with(X, NAN)], truths=[_with(X.double(), -INF)])
        is not None
    )
    assert why_other_form([X], [_with(X, NAN)], truths=[X.double()]) is None
    assert why_other_form([X], [_with(X, NAN)], truths=[2 * X.double()]) is not None
    assert why_other_form([X], [_with(X, NAN)], truths=[_with(X.double(), INF)]) is not None


def test_strides_can_be_left_out() -> None:
    assert why_other_form([X.T.contiguous().T], [X], strides=False) is None
    assert why_other_form([X.double()], [X], strides=False) is not None


def test_where_only_the_original_overflows_any_number_is_right() -> None:
    half, truth = X.half(), [2 * X.double()]
    assert why_other_form([half], [_with(half, NAN)], truths=truth) is not None
    for special in (NAN, INF):
        assert why_other_form([half], [_with(half, special)], truths=truth, overflows=True) is None
        # float32 does not overflow so soon, and the engine may not overflow alone
        assert why_other_form([X], [_with(X, special)], truths=truth, overflows=True) is not None
        assert (
            why_other_form([_with(half, special)], [half], truths=truth, overflows=True) is not None
        )
    infinite = [_with(X.double(), INF)]
    assert why_other_form([half], [_with(half, NAN)], truths=infinite, overflows=True) is not None

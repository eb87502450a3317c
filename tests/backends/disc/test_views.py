# SPDX-License-Identifier: Apache-2.0
"""Strides of reshaped values against torch's own answer, with numbers and with symbols."""

import math

import hypothesis.strategies as st
import pytest
import torch
from disc_programs import S0, S1
from hypothesis import given, settings

from blade.backends.disc.ir.views import collapse, reshape_strides


@st.composite
def strided_and_shape(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4))
    x = torch.arange(math.prod(factors) * 2).reshape(*factors, 2)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = x[..., :1].expand(*x.shape)
    pool = [d for d in x.shape if d != 1] + draw(st.lists(st.just(1), max_size=2))
    shape: list[int] = []
    for dim in draw(st.permutations(pool)) if draw(st.booleans()) else pool:
        if shape and draw(st.booleans()):
            shape[-1] *= dim
        else:
            shape.append(dim)
    return x, tuple(shape)


@given(strided_and_shape())
@settings(max_examples=300, deadline=None)
def test_reshape_strides_address_the_same_elements(
    case: tuple[torch.Tensor, tuple[int, ...]],
) -> None:
    x, shape = case
    strides = reshape_strides(tuple(x.shape), tuple(x.stride()), shape)
    if strides is None:
        with pytest.raises(RuntimeError):
            x.view(shape)
    else:
        again = torch.as_strided(x, shape, [int(s) for s in strides], x.storage_offset())
        assert torch.equal(again, x.reshape(shape))


def test_symbolic_split_and_merge() -> None:
    shape, strides = (S0, S1, 384), (384 * S1, 384, 1)
    assert reshape_strides(shape, strides, (S0, S1, 12, 32)) == (384 * S1, 384, 32, 1)
    assert reshape_strides(shape, strides, (S0 * S1, 384)) == (384, 1)
    transposed = (32 * S1 * 12, 32, 384, 1)
    assert reshape_strides((S0, 12, S1, 32), transposed, (S0, 12 * S1, 32)) is None


def test_collapse_needs_every_access_to_agree() -> None:
    dense, bias = (S1 * 8, 8, 1), (0, 0, 1)
    assert collapse((S0, S1, 8), [dense]) == ((S0 * S1 * 8,), [(1,)])
    assert collapse((S0, S1, 8), [dense, bias]) == ((S0 * S1, 8), [(8, 1), (0, 1)])

# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 does not read the keys that a mask hides; a query that sees one has its NaN."""

import math

import pytest
import torch
from torch.nn import functional as F

from blade.core.hidden_keys import hidden_keys
from blade.verification.attend_to_seen import attend_to_seen

RNG = torch.Generator().manual_seed(0)
SEEN = torch.rand(2, 1, 33, 47, generator=RNG) > 0.4
SEEN[1, 0, 5] = False  # a query that sees no key


def masked(number: float) -> torch.Tensor:
    return torch.zeros(SEEN.shape, dtype=torch.float64).masked_fill(~SEEN, number)


MASKS = {
    "bool": SEEN,
    "infinity": masked(-math.inf),
    "65504": masked(-65504.0),
    "least": masked(torch.finfo(torch.bfloat16).min),
}


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", MASKS)
def test_a_hidden_key_changes_nothing(name: str, number: float, where: str, heads: int) -> None:
    shapes = (4, 33), (heads, 47), (heads, 47)
    q, k, v = (torch.randn(2, *s, 16, dtype=torch.float64, generator=RNG) for s in shapes)
    rest = {"attn_mask": MASKS[name], "enable_gqa": True}
    clean = F.scaled_dot_product_attention(q, k, v, **rest)
    assert torch.equal(attend_to_seen(q, k, v, **rest), clean)
    (k if where == "key" else v)[:, :, 11, 3] = number
    want = F.scaled_dot_product_attention(q, k, v, **rest)
    got = attend_to_seen(q, k, v, **rest)
    reads = SEEN[..., 11:12].expand(2, 4, 33, 1).clone()
    if name in ("65504", "least"):
        reads[1, :, 5] = True  # it weighs all keys, as all are hidden by a number
    assert torch.equal(torch.where(reads, 0.0, got), torch.where(reads, 0.0, clean))
    torch.testing.assert_close(
        torch.where(reads, got, 0.0), torch.where(reads, want, 0.0), rtol=0, atol=0, equal_nan=True
    )


def test_what_a_bias_hides() -> None:
    rows = torch.tensor([[0.0, -65504, -1e4], [-math.inf, -65504, -7e4], [-5e4, -7e4, 1.0]])
    want = [[False, True, False], [True, False, False], [False, True, False]]
    assert hidden_keys(rows).tolist() == want
    assert hidden_keys(torch.zeros(2, 0)).shape == (2, 0)

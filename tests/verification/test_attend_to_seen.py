# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 does not read the keys that a mask hides; a query that sees one has its NaN."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from blade.core.hidden_keys import hidden_keys
from blade.core.reason import Code
from blade.dynamo import disc
from blade.dynamo.live_graphs import live_graphs
from blade.verification.attend_to_seen import attend_to_seen, flash_attend_to_seen

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
        torch.where(reads, got, 0.0),
        torch.where(reads, want, 0.0),
        rtol=0,
        atol=1e-12,
        equal_nan=True,
    )


@pytest.mark.parametrize("length", [33, 300, 900])
@pytest.mark.parametrize("function", [attend_to_seen, flash_attend_to_seen])
def test_a_later_key_changes_nothing(function: Callable[..., Any], length: int) -> None:
    """Torch's kernel makes NaN of a block of 32, 64 or 256 queries."""
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float64, generator=RNG) for _ in range(3))
    clean = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    v[:, :, 30, 3] = math.nan
    found = function(q, k, v, is_causal=True)
    got = found if isinstance(found, torch.Tensor) else found[0]
    torch.testing.assert_close(got[:, :, :30], clean[:, :, :30], rtol=1e-12, atol=1e-12)
    assert bool(got[:, :, 30:, 3].isnan().all())


@pytest.mark.needs("runtime", "torch_mlir")
def test_an_engine_of_causal_attention_serves_at_any_length() -> None:
    """Its blocks of queries are not those of torch's kernel."""

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True) + 1).relu()

    before = set(live_graphs())
    run = torch.compile(causal, backend=disc)
    for length in (40, 300, 900):
        given = [torch.randn(1, 2, length, 16) for _ in range(3)]
        torch.testing.assert_close(run(*given), causal(*given))
    made = [one for one in live_graphs() if one not in before]
    assert made
    for graph in made:
        codes = {reason.code for one in graph.report().clusters for reason in one.reasons}
        assert Code.WRONG_VALUES not in codes


def test_what_a_bias_hides() -> None:
    rows = torch.tensor([[0.0, -65504, -1e4], [-math.inf, -65504, -7e4], [-5e4, -7e4, 1.0]])
    want = [[False, True, False], [True, False, False], [False, True, False]]
    assert hidden_keys(rows).tolist() == want
    assert hidden_keys(torch.zeros(2, 0)).shape == (2, 0)

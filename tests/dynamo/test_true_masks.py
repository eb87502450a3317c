# SPDX-License-Identifier: Apache-2.0
"""Masks that hide nothing leave a graph, and no other masks do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional as F

from blade.dynamo.true_masks import drop_true_masks

Q = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))


def masks_of(make: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor = Q) -> list[Any]:
    """The masks of the attention's calls in Dynamo's graph, after the pass; answers stay what they are."""
    found: list[Any] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        drop_true_masks(gm)
        calls = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
        found.extend(
            n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in calls
        )
        return gm.forward

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(q))

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend=backend)(q), attend(q))
    assert found
    return found


def rows(q: torch.Tensor, shift: int = 0) -> torch.Tensor:
    return torch.arange(q.shape[2])[None, None, :, None] + shift


HIDES_NOTHING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of transformers 5.17": lambda q: (rows(q) >= 0).expand(q.shape[0], -1, -1, q.shape[2]),
    "both": lambda q: (rows(q) >= 0) & (rows(q) < 5),
    "one of two": lambda q: (rows(q) > 2) | (rows(q) > -1),
    "differences": lambda q: rows(q, 7) - rows(q) > 2,
    "ones": lambda q: torch.ones(5, 5, dtype=torch.bool),
    "new ones": lambda q: rows(q).new_ones((5, 5), dtype=torch.bool),
}
HIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "causal": lambda q: rows(q) >= torch.arange(5),
    "the first": lambda q: rows(q, -1).expand(-1, -1, -1, 5) != -1,
    "some": lambda q: (torch.arange(5) + 2 >= 3)[None],
    "one of two": lambda q: (rows(q) >= 0) & (torch.arange(5) > 1),
    "numbers": lambda q: (torch.arange(5) >= 0)[None].float(),
    "of the inputs": lambda q: q[:, :1, :, :5] < 10,
    "too small for the numbers": lambda q: (torch.arange(5, dtype=torch.int8) + 126)[None] >= 0,
}


@pytest.mark.parametrize("name", HIDES_NOTHING)
def test_a_mask_that_hides_nothing_is_dropped(name: str) -> None:
    assert masks_of(HIDES_NOTHING[name]) == [None]


@pytest.mark.parametrize("name", HIDES)
def test_every_other_mask_stays(name: str) -> None:
    assert None not in masks_of(HIDES[name])


def test_a_mask_that_is_written_stays() -> None:
    def written(q: torch.Tensor) -> torch.Tensor:
        mask = rows(q).expand(-1, -1, -1, 5) >= 0
        mask = mask.contiguous()
        mask[..., 2] = False
        return mask

    assert None not in masks_of(written)


def test_a_mask_of_a_dynamic_size_is_dropped() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        drop_true_masks(gm)
        seen.extend(n for n in gm.graph.nodes if "arange" in str(n.target))
        return gm.forward

    def attend(q: torch.Tensor) -> torch.Tensor:
        mask = (rows(q) >= 0).expand(q.shape[0], -1, -1, q.shape[2])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    compiled = torch.compile(attend, backend=backend, dynamic=True)
    for size in (4, 7):
        q = torch.randn(2, 3, size, 8)
        torch.testing.assert_close(compiled(q), attend(q))
    assert not seen

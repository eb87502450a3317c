# SPDX-License-Identifier: Apache-2.0
"""Which guards of torch's shape functions stay: those whose answer changes a size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_trace import trace

from blade.backends.disc.lower import lower


def facts(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """What the lowered program relies on; every size is dynamic."""
    samples = [torch.randn(s) for s in shapes]
    gm, shape_env = trace(function, samples, [[True] * len(s) for s in shapes])
    assert shape_env.guards, "torch asks nothing: this tests nothing"
    return [str(fact.relation) for fact in lower(gm, shape_env).facts]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).reshape(-1),
        lambda x: x.permute(2, 0, 1).reshape(x.shape[2], -1) * 2,
        lambda x: torch.einsum("abc,abd->acd", x, x),
        lambda x: x[None].contiguous(memory_format=torch.channels_last),
        lambda x: x.select(1, 0).unsqueeze(1).transpose(0, 1).squeeze(0) + 1,
    ],
)
def test_a_question_about_strides_is_dropped(function: Callable[..., Any]) -> None:
    assert not [f for f in facts(function, (3, 5, 4)) if f.startswith("Ne")]


def test_a_size_that_squeeze_would_drop_is_guarded() -> None:
    assert facts(lambda x: x.squeeze(1) * 2, (3, 5)) != []
    assert facts(lambda x: x.squeeze() * 2, (3, 5)) != []


def test_sizes_that_broadcast_only_at_one_are_guarded() -> None:
    found = facts(lambda x, y: x + y, (3, 5), (3, 5))
    assert sum(f.startswith("Eq") for f in found) == 2


def test_what_torch_does_not_do_is_guarded() -> None:
    found = facts(lambda x: torch.nn.functional.pad(x, (1, 2), mode="reflect"), (3, 5))
    assert len(found) == 1 and "> 2" in found[0]

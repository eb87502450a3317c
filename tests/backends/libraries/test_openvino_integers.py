# SPDX-License-Identifier: Apache-2.0
"""int64 through OpenVINO, which computes it in int32: taken where that makes no difference, checked elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutting import cut, trace
from torch import nn

import blade
from blade.backends.openvino.int64_bounds import (
    LIMIT,
    check_bounds,
    is_within,
    why_not,
)
from blade.core.cluster import OpNode, ValueInfo
from blade.core.reason import Code
from blade.errors import Refused

aten = torch.ops.aten
LONG = ValueInfo("tensor", torch.int64, torch.device("cpu"), 2)
FLOAT = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("target", "args", "output", "taken"),
    [
        (aten.embedding.default, (FLOAT, LONG), FLOAT, True),
        (aten.add.Tensor, (LONG, LONG), LONG, True),
        (aten.mul.Tensor, (LONG, LONG), LONG, False),
        (aten.mul.Tensor, (FLOAT, FLOAT), FLOAT, True),
        (aten.sum.default, (LONG,), LONG, False),
        (aten.to.dtype, (LONG, torch.float32), FLOAT, True),
        (aten.to.dtype, (FLOAT, torch.int64), LONG, False),
    ],
)
def test_ops_that_need_more_bits_are_not_taken(
    target: Any, args: tuple[Any, ...], output: ValueInfo, taken: bool
) -> None:
    reason = why_not(OpNode("n", target, args, {}, (output,)), "openvino")
    assert (reason is None) is taken
    assert reason is None or reason.code is Code.UNSUPPORTED_DTYPE


def bounds_hold(function: Callable[..., Any], *sample: torch.Tensor) -> bool:
    [extracted] = cut(trace(function, sample))
    try:
        check_bounds(extracted.cluster)
    except Refused as refused:
        assert refused.code is Code.UNSUPPORTED_DTYPE
        return False
    return True


X = torch.arange(12).view(3, 4)
OFFSETS, FAR = torch.tensor([3, -5, 7, 9]), torch.tensor([2**31, 0, 0, 0])


@pytest.mark.parametrize(
    ("function", "holds"),
    [
        (lambda x: (x + x) + (x + x), True),
        (lambda x: ((x + x) + (x + x)) + ((x + x) + (x + x)), False),
        (lambda x: torch.add(x, x, alpha=8), False),
        (lambda x: x + OFFSETS + 100, True),
        (lambda x: x + FAR, False),
        (lambda x: (x > 2**40) & (x < 5), False),
        (lambda x: x.masked_fill(x > 5, 2**35) + 1, False),
        (lambda x: x.to(torch.int32).exp().relu(), True),
        (lambda x: (x.float() + 2**40).relu(), True),
        (lambda x: x + torch.arange(x.shape[1]), True),
    ],
)
def test_sums_are_followed_as_far_as_they_may_reach(
    function: Callable[..., Any], holds: bool
) -> None:
    assert bounds_hold(function, X) is holds


def test_what_is_within_the_limit() -> None:
    assert is_within(torch.tensor([-LIMIT, LIMIT])) and is_within(torch.empty(0, dtype=torch.int64))
    assert not is_within(torch.tensor([0, LIMIT + 1]))
    assert not is_within(torch.tensor([-(2**63)]))


class Lookup(nn.Module):
    """Tokens, positions and a mask of integers, as text models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(20, 32)
        self.linear = nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device) + 2
        hidden = self.words(ids) + self.places(places)
        kept = mask.to(torch.bool)[:, None, :]
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~kept, -1e4)
        return torch.tanh(self.linear(scores.softmax(-1) @ hidden))


def text(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(batch * length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, length // 2 + 1 :] = 0
    return torch.randint(0, 50, (batch, length), generator=rng), mask


@pytest.fixture(scope="module")
def optimized() -> torch.jit.ScriptModule:
    config = blade.Config(optimization_pipeline="openvino", timing=False, strict=True, cache=False)
    return blade.optimize(Lookup().eval(), [text(2, 6), text(3, 9)], config)


def counts(module: torch.jit.ScriptModule) -> dict[str, int]:
    [found] = blade.stats(module).values()
    return found


@pytest.mark.needs("runtime", "openvino")
def test_one_engine_takes_a_text_model_and_serves_other_sizes(
    optimized: torch.jit.ScriptModule,
) -> None:
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == "openvino" and cluster.ops["aten::embedding"] == 2
    before = counts(optimized)["engine_runs"]
    for size in ((2, 6), (1, 1), (4, 18), (5, 3)):
        with torch.no_grad():
            torch.testing.assert_close(
                optimized(*text(*size)), Lookup().eval()(*text(*size)), rtol=1e-4, atol=1e-5
            )
    assert counts(optimized)["engine_runs"] == before + 4


@pytest.mark.needs("runtime", "openvino")
@pytest.mark.parametrize("bad", [50, -1, 2**31 + 5, 2**32 + 5])
def test_an_index_out_of_range_raises_as_in_torch(
    optimized: torch.jit.ScriptModule, bad: int
) -> None:
    ids, mask = text(2, 6)
    ids[1, 3] = bad
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        optimized(ids, mask)
    torch.testing.assert_close(optimized(*text(2, 6)), Lookup().eval()(*text(2, 6)))


@pytest.mark.needs("runtime", "openvino")
def test_too_many_positions_raise_as_in_torch(optimized: torch.jit.ScriptModule) -> None:
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        optimized(*text(2, 19))


@pytest.mark.needs("runtime", "openvino")
def test_a_mask_of_large_numbers_is_a_mask(optimized: torch.jit.ScriptModule) -> None:
    ids, mask = text(2, 6)
    before = counts(optimized)["fallbacks"]
    with torch.no_grad():
        torch.testing.assert_close(optimized(ids, mask * 2**32), Lookup().eval()(ids, mask))
    assert counts(optimized)["fallbacks"] == before + 1

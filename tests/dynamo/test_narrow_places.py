# SPDX-License-Identifier: Apache-2.0
"""Places of maxima that forward saves for backward: in few bits, and the same gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import blade
from blade.dynamo import forward_backward, narrow_places
from blade.verification.saved_choices import saved_choices


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Of what backward takes, with the places of a CPU narrowed as those of a GPU."""
    found: list[torch.dtype] = []
    cut: Callable[..., tuple[GraphModule, GraphModule]] = forward_backward.partition

    def spy(*args: object, **kwargs: object) -> tuple[GraphModule, GraphModule]:
        forward, backward = cut(*args, **kwargs)
        values = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
        found.extend(v.dtype for v in values if isinstance(v, torch.Tensor))
        (returned,) = forward.graph.output_node().args
        made = {k: n.meta["val"] for k, n in enumerate(returned) if isinstance(n, torch.fx.Node)}
        tensors = {k: v for k, v in made.items() if isinstance(v, torch.Tensor)}
        whole = {k for k, v in tensors.items() if not v.dtype.is_floating_point}
        # where rounding ties two pixels, either is right
        assert saved_choices(forward, tensors) == whole and len(whole) == 1
        return forward, backward

    monkeypatch.setattr("blade.dynamo.backends.partition", spy)
    monkeypatch.setattr(narrow_places, "_is_on_cpu", lambda image: False)
    return found


@pytest.mark.parametrize(
    "side, dynamic, want",
    [
        (12, False, torch.int16),
        (200, False, torch.int16),  # more pixels than int16 has positive numbers
        (260, False, torch.int32),
        (12, True, torch.int32),
    ],
)
def test_places_cross_in_few_bits(
    side: int, dynamic: bool, want: torch.dtype, dtypes: list[torch.dtype]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(3, 2, 1), nn.Tanh())
    other, x = copy.deepcopy(model), torch.randn(2, 2, side, side)
    options = {"timing": False}
    run = torch.compile(model, backend=blade.dynamo.aot_disc, dynamic=dynamic, options=options)
    for one in (run, other):
        one(x).square().sum().backward()
    assert want in dtypes and torch.int64 not in dtypes
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_on_a_cpu_places_cross_as_they_are(
    dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow_places, "_is_on_cpu", lambda image: True)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))
    run = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    run(torch.randn(2, 2, 8, 8)).sum().backward()
    assert torch.int64 in dtypes

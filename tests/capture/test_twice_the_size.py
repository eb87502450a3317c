# SPDX-License-Identifier: Apache-2.0
"""A loop over blocks of the input goes around once more at twice the size, and not at one that is a little larger."""

import warnings

import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.capture.references import TWICE, run_references
from blade.config import Config
from blade.errors import BladeWarning, InputError

SAMPLE = torch.randn(2, 32, 4, generator=torch.Generator().manual_seed(0))


class Blocks(nn.Module):
    """Adds each block of 16 to the one before; what is left over does not count. No script understands it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x[:, begin : begin + 16] for begin in range(0, int(x.shape[1]) // 16 * 16, 16)]
        add = {True: lambda a, b: a + b.tanh()}
        total = made[0]
        for one in made[1:]:
            total = add[True](total, one)
        return total


def test_a_loop_over_blocks_is_no_trace_for_all_sizes() -> None:
    with pytest.raises(InputError, match=r"twice the size \(x: float32\[1, 64, 1\]\)"):
        capture(Blocks().eval(), SAMPLE, Config(strict=True))


@pytest.mark.filterwarnings("ignore:Blocks:blade.BladeWarning")
@pytest.mark.parametrize("allow_tracing", [None, True])
def test_it_is_kept_where_it_is_right(allow_tracing: bool | None) -> None:
    model = Blocks().eval()
    captured = capture(model, SAMPLE, Config(allow_tracing=allow_tracing))
    [path] = captured.paths
    assert "(16*(x.size(1) // 16)) == (32)" in path.conditions
    for size in (32, 40, 47):
        x = torch.randn(5, size, 4)
        torch.testing.assert_close(captured.module(x), model(x))
    with pytest.raises(Exception, match="in range"):
        captured.module(torch.randn(2, 64, 4))


def test_each_is_doubled_alone_and_tells_of_the_trace_only() -> None:
    seen = run_references(nn.Tanh().eval(), torch.randn(4, 8, 12), Config(), bake=True)
    twice = [tuple(one.sample[0].shape) for one in seen.references if one.what == TWICE]
    assert twice == [(1, 16, 1), (1, 1, 24)]
    captured = capture(nn.Tanh().eval(), torch.randn(4, 8, 12), Config())
    assert TWICE not in {one.what for one in captured.references}


def test_declared_sizes_at_which_it_is_right_are_served() -> None:
    config = Config(dynamic_shapes={0: {1: (32, 40)}})
    with warnings.catch_warnings():
        warnings.simplefilter("error", BladeWarning)
        captured = capture(Blocks().eval(), SAMPLE, config)
    assert {probe[0].shape[1] for probe in captured.probes} >= {40}

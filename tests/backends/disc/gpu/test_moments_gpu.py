# SPDX-License-Identifier: Apache-2.0
"""Mean and deviation of groups of channels for GPUs: values in Triton's interpreter, against float64."""

import pytest
import torch
from cpu_native import symbol
from library_launches import run
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.frontend.ops.group_moments import reference
from blade.backends.disc.gpu.library.group_moments import PARTS, TILE, moments
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import GpuTarget

pytestmark = pytest.mark.needs("triton_interpreter")
N, H, W = symbol("s0"), symbol("s1"), symbol("s2")
IMAGES = (True, False, True, True)


def made(channels: int, groups: int, layout: str, dtype: torch.dtype) -> tuple[Value, Value]:
    """The input and its moments. ``layout``: how [N, C, H, W] lies in memory, or "window": in a larger image."""
    b = IrBuilder()
    if layout == "channels_last":
        x = b.make("input", (), (N, H, W, channels), dtype, index=0)
        y = b.permute(x, (0, 3, 1, 2))
    elif layout == "contiguous":
        x = y = b.make("input", (), (N, channels, H, W), dtype, index=0)
    else:
        x = b.make("input", (), (N, H + 1, W + 2, channels), dtype, index=0)
        y = b.slice(b.slice(x, 1, 1, 1, H), 2, 1, 1, W)
        y = b.permute(y, (0, 3, 1, 2))
    attrs = {"groups": groups, "eps": 1e-5}
    return x, b.make("group_moments", (y,), (2, N, channels), torch.float32, **attrs)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "window"])
@pytest.mark.parametrize(("channels", "groups"), [(16, 4), (30, 3), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_layout(layout: str, channels: int, groups: int, dtype: torch.dtype) -> None:
    """One pixel, a few, and so many that programs share a group; a mean far from zero."""
    torch.manual_seed(0)
    x, value = made(channels, groups, layout, dtype)
    launches = moments(value, GpuTarget(), Counters(64), SizeRelations())
    for n, h, w in ((1, 1, 1), (2, 5, 7), (1, 2 * PARTS, 2 * TILE // channels // PARTS)):
        sizes = {"s0": n, "s1": h, "s2": w}
        given = torch.randn(
            [d if isinstance(d, int) else int(d.subs({N: n, H: h, W: w})) for d in x.shape]
        )
        given = (given + 30).to(dtype)
        seen = given if layout == "contiguous" else given.permute(0, 3, 1, 2)
        seen = seen[:, :, 1:, 1:-1] if layout == "window" else seen
        got = torch.full((2, n, channels), torch.nan)
        ran = run(launches, {x.id: given, value.id: got}, sizes)
        shared = h * w * (channels // groups) > TILE
        assert [("partial" in one.choice.unit.text) for one in ran] == [shared]
        torch.testing.assert_close(
            got.double(), reference(value, seen.double()).double(), rtol=2e-5, atol=0
        )


class Normalized(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 32)
        self.last = last
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x = x.movedim(-1, 1) if self.last else x
        y = nn.functional.silu(self.norm(x))
        return y.movedim(1, -1) if self.last else y


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_a_group_norm_is_two_launches(last: bool) -> None:
    """With what follows it, wherever the channels lie."""
    torch.manual_seed(0)
    model = Normalized(last).eval().half()
    shape = (2, 6, 5, 32) if last else (2, 32, 6, 5)
    dynamic = (True, True, True, False) if last else IMAGES
    program = compiled(model, [torch.randn(shape).half()], [dynamic])
    x = torch.randn(shape).half()
    torch.testing.assert_close(program(x)[0], model(x), rtol=2e-3, atol=2e-3)
    counted = "aten::zero_"  # once per call: the counters of programs that share a group
    assert program.ran(x) == [counted, "loop", "group_moments", "loop"]
    assert " arena f16 4 " in program.text and " arena f32 4 " not in program.text


def test_a_channel_by_itself_is_summed_beside_others() -> None:
    """Instance norm of halves: two bytes of a pixel are less than memory is read by."""
    norm = nn.InstanceNorm2d(16, affine=True).eval().half()
    x = torch.randn(2, 16, 4, 5).half()
    program = compiled(norm, [x], [IMAGES])
    torch.testing.assert_close(program(x)[0], norm(x), rtol=2e-3, atol=2e-3)
    assert "group_moments" not in program.ran(x)

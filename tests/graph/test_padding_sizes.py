# SPDX-License-Identifier: Apache-2.0
"""Sizes that pad to a multiple stay short, and what stays long is not looked at."""

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.graph.shapes.padding_sizes import is_padded, shortened
from blade.graph.shapes.symbolic import UnspecializedShapeEnv
from blade.graph.torchscript.decision_checks import checks_of


def size(hint: int) -> torch.SymInt:
    env = UnspecializedShapeEnv()
    symbol = env.create_unspecified_symbol(hint, ConstantSource("x"), DimDynamic.DYNAMIC)
    made: torch.SymInt = env.create_symintnode(symbol, hint=hint)
    return made


@pytest.mark.parametrize("hint", [13, 14])
def test_a_padding_is_written_with_one_division(hint: int) -> None:
    h = size(hint)
    padding = shortened((7 - h % 7) % 7)
    [symbol] = h.node.expr.free_symbols
    assert str((h + padding).node.expr) == f"7*((({symbol} + 6)//7))"
    for value in range(1, 40):
        assert padding.node.expr.xreplace({symbol: value}) == (7 - value % 7) % 7
    assert padding.node.hint == (7 - hint % 7) % 7


def test_a_padded_size_is_known_to_be_large_enough() -> None:
    h = (size(13) - 1) // 4 + 1
    padded = h + shortened((4 - h % 4) % 4)
    assert is_padded(padded, h)
    assert is_padded((padded // 4) * 4, h)
    assert not is_padded(padded, h + 1)
    assert not is_padded(padded + 1, h)
    assert not is_padded(padded - 4, h)
    assert not is_padded(h, h)
    assert not is_padded(8, 5)


@pytest.mark.parametrize(
    "other",
    [
        lambda h: h % 7,
        lambda h: (5 - h % 7) % 7,
        lambda h: (7 - h % 5) % 7,
        lambda h: (7 + h % 7) % 7,
        lambda h: h + 1,
    ],
)
def test_other_sizes_are_left_alone(other: object) -> None:
    h = size(13)
    number = other(h)  # type: ignore[operator]
    assert shortened(number) is number
    assert shortened(3) == 3


class Windows(nn.Module):
    """Pads to windows and to an even size, at each of ``stages``."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages
        self.down = nn.Conv2d(4, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.stages):
            (b, c, h, w), k = x.shape, 3
            x = nn.functional.pad(x, (0, (k - w % k) % k, 0, (k - h % k) % k))
            rows, columns = x.shape[2] // k, x.shape[3] // k
            parts = x.view(b, c, rows, k, columns, k).permute(0, 2, 4, 3, 5, 1)
            parts = parts.reshape(-1, k * k, c).softmax(1)
            x = parts.view(b, rows, columns, k, k, c).permute(0, 5, 1, 3, 2, 4)
            x = x.reshape(b, c, rows * k, columns * k)[:, :, :h, :w]
            x = self.down(nn.functional.pad(x, (0, (2 - w % 2) % 2, 0, (2 - h % 2) % 2)))
        return x.mean((2, 3))


@pytest.mark.needs("runtime")
def test_windows_at_several_stages() -> None:
    model = Windows(3).eval()
    x = torch.linspace(-1, 1, 2 * 4 * 48 * 48).reshape(2, 4, 48, 48)
    config = blade.Config(timing=False, optimization_pipeline="disc")
    optimized = blade.optimize(model, x, config)
    with torch.no_grad():
        for given in (x, x[:1, :, :35, :41].contiguous(), x[:, :, :48, :29].contiguous()):
            torch.testing.assert_close(optimized(given), model(given))
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] >= 1


class Doubling(nn.Module):
    """Sizes whose expression doubles with each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        for k in range(3, 13):
            n = n + n % k
        return x.exp() if n > 10 else x.sin()


def test_a_size_of_many_terms_is_not_written_out() -> None:
    captured = capture(Doubling().eval(), torch.ones(5), Config(allow_tracing=True, max_paths=1))
    assert all(len(check.text) < 1000 for check in checks_of(captured.module.graph))
    for rows in (5, 1, 29):
        x = torch.ones(rows)
        assert torch.equal(captured.module(x), Doubling()(x))

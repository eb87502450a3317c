# SPDX-License-Identifier: Apache-2.0
"""Sizes that pad to a multiple stay short, and what stays long is not looked at."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.core.torch_modes import dispatched_in_python
from blade.graph.fx.writer import FxWriter, writing
from blade.graph.shapes.padding_sizes import is_padded, shortened
from blade.graph.shapes.shape_functions import result_of
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


def same_padding(n: Any, window: int, step: int) -> Any:
    return torch.sym_max(0, (-(-n // step) - 1) * step + window - n)


def convolved(x: torch.Tensor, window: int, step: int) -> torch.Tensor:
    weight = torch.empty(x.shape[1], x.shape[1], window, window, dtype=x.dtype)
    rest = [[step, step], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, True]
    found: torch.Tensor = result_of(
        torch.ops.aten._convolution.default, [x, weight, None, *rest], {}
    )
    return found


def pooled(x: torch.Tensor, window: int, step: int) -> torch.Tensor:
    op = torch.ops.aten.avg_pool2d.default
    found: torch.Tensor = result_of(op, [x, [window, window], [step, step]], {})
    return found


@pytest.mark.parametrize("layer", [convolved, pooled])
@pytest.mark.parametrize("window, step", [(1, 2), (2, 2), (3, 2), (7, 2), (3, 3), (5, 4)])
def test_windows_in_same_padding_are_counted_with_one_division(
    layer: Any, window: int, step: int
) -> None:
    writer, dynamic = FxWriter(), [DimDynamic.STATIC] * 2 + [DimDynamic.DYNAMIC] * 2
    with writing():
        x = writer.place("x", torch.empty(2, 4, 900, 700), dynamic, "").meta["val"]
        [symbol] = x.shape[2].node.expr.free_symbols
        with writer.mode, dispatched_in_python():
            x = x.to(memory_format=torch.channels_last)
            for _ in range(3):
                down, right = (same_padding(n, window, step) for n in x.shape[2:])
                pads = [right // 2, right - right // 2, down // 2, down - down // 2]
                x = layer(torch.ops.aten.pad.default(x, pads), window, step)
    assert str(x.shape[2].node.expr) == f"((({symbol} - 1)//{step**3})) + 1"
    assert x.shape[2].node.hint == -(-900 // step**3)
    assert x.shape[3].node.hint == -(-700 // step**3)
    if layer is pooled:  # a convolution's own layout depends on its library
        assert x.stride()[1] == 1


def test_windows_in_another_padding_are_counted_as_before() -> None:
    writer, dynamic = FxWriter(), [DimDynamic.STATIC] * 2 + [DimDynamic.DYNAMIC] * 2
    with writing():
        x = writer.place("x", torch.empty(2, 4, 9, 7), dynamic, "").meta["val"]
        height, width = x.shape[2:]
        with writer.mode, dispatched_in_python():
            pads = [0, 0, 0, torch.sym_max(0, width - height)]
            found = convolved(torch.ops.aten.pad.default(x, pads), 3, 2).shape[2].node.expr
    names = (height.node.expr, width.node.expr)
    for h, w in ((9, 7), (7, 9), (8, 8), (5, 12)):
        assert found.xreplace(dict(zip(names, (h, w)))) == (max(h, w) - 3) // 2 + 1


def engine_runs(model: nn.Module) -> int:
    """How often an engine served images of three sizes, whose results are checked."""
    x = torch.linspace(-1, 1, 2 * 4 * 48 * 48).reshape(2, 4, 48, 48)
    config = blade.Config(timing=False, optimization_pipeline="disc")
    optimized = blade.optimize(model, x, config)
    with torch.no_grad():
        for given in (x, x[:1, :, :35, :41].contiguous(), x[:, :, :48, :29].contiguous()):
            torch.testing.assert_close(optimized(given), model(given))
    runs: int = blade.stats(optimized)["cluster_0"]["engine_runs"]
    return runs


class Same(nn.Module):
    """A convolution with step 2 in "same" padding at each of ``stages``, and a shortcut around it."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages
        self.down, self.around = nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.stages):
            short = nn.functional.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
            down, right = map(self.padding, x.shape[2:])
            pads = (right // 2, right - right // 2, down // 2, down - down // 2)
            x = self.down(nn.functional.pad(x, pads)).relu() + self.around(short)
        return x.mean((2, 3))

    def padding(self, n: Any) -> Any:
        """Sizes are tensors while a model is traced."""
        if isinstance(n, torch.Tensor):
            return torch.clamp(((n / 2).ceil() - 1) * 2 + 3 - n, min=0)
        return max((-(-n // 2) - 1) * 2 + 3 - n, 0)


@pytest.mark.needs("runtime")
def test_same_padding_at_several_stages() -> None:
    assert engine_runs(Same(3).eval()) >= 3


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
    assert engine_runs(Windows(3).eval()) >= 1


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

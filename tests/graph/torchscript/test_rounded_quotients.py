# SPDX-License-Identifier: Apache-2.0
"""Sizes that a trace computes by rounding a quotient, or by a root, as vision models of transformers and timm do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.graph.torchscript import to_fx

DISC = Config(optimization_pipeline="disc", timing=False)
pytestmark = pytest.mark.needs("torch_mlir", "runtime")


def whole(number: Any) -> Any:
    """``int(number)``; in a trace, where sizes are tensors, an int64 tensor."""
    return number.to(torch.int64) if isinstance(number, torch.Tensor) else int(number)


def up(number: Any) -> Any:
    return torch.ceil(number) if isinstance(number, torch.Tensor) else -(-number // 1)


def down(number: Any) -> Any:
    return torch.floor(number) if isinstance(number, torch.Tensor) else number // 1


def bounded(number: Any, low: int, high: int | None = None) -> Any:
    if isinstance(number, torch.Tensor):
        return torch.clamp(number, min=low, max=high)
    return max(number, low) if high is None else min(max(number, low), high)


def greater(a: Any, b: int) -> Any:
    if isinstance(a, torch.Tensor):
        return torch.where(a > b, a, torch.tensor(b))
    return max(a, b)


def smaller(a: Any, b: int) -> Any:
    if isinstance(a, torch.Tensor):
        return torch.where(a <= b, a, torch.tensor(b))
    return min(a, b)


class Padded(nn.Module):
    """Pads its rows to a number that ``size`` makes of them."""

    def __init__(self, size: Callable[[Any], Any]) -> None:
        super().__init__()
        self.size, self.dense = size, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        padded = nn.functional.pad(x, (0, 0, 0, self.size(rows) - rows))
        return self.dense(padded).relu() * 2


SIZES: dict[str, Callable[[Any], Any]] = {
    "up": lambda n: whole(up(n / 4) * 4),
    "down and more": lambda n: whole(down(n / 3) * 3 + 6),
    "one more": lambda n: whole(up((n - 3) / 2 + 1)) * 2 + 5,
    "same padding": lambda n: n + whole(bounded((up(n / 2) - 1) * 2 + 5 - n, 0) // 2),
    "between bounds": lambda n: n + whole(bounded(up(n / 3) - 2, 1, 6)),
    "root": lambda n: n + whole(n**0.5),
    "root of a sum": lambda n: 2 * n + whole((n * n + 1) ** 0.5),
    "the greater one": lambda n: greater(n - 4, 5) + n,
    "the smaller one": lambda n: smaller(n - 4, 5) + n + 1,
    "one less": lambda n: whole(down(n / 5 - 1) * 5) + 10,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_rounded_quotient_is_a_size(name: str) -> None:
    torch.manual_seed(0)
    model = Padded(SIZES[name]).eval()
    fast = blade.optimize(model, torch.randn(2, 8, 6), DISC)
    [cluster] = blade.report(fast).clusters
    assert cluster.backend == "disc" and not blade.report(fast).outside
    for rows in (3, 7, 8, 9, 12, 31):
        x = torch.randn(2, rows, 6)
        torch.testing.assert_close(fast(x), model(x))
    stats = blade.stats(fast)["cluster_0"]
    assert stats["engine_runs"] == stats["calls"] == 6


def test_a_size_beyond_the_exact_ones_is_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 may round a quotient to an integer that it is not."""
    monkeypatch.setattr(to_fx, "EXACT", 64)
    model = Padded(SIZES["up"]).eval()
    fast = blade.optimize(model, torch.randn(2, 8, 6), DISC)
    for rows, runs in ((63, 1), (66, 1)):
        x = torch.randn(2, rows, 6)
        torch.testing.assert_close(fast(x), model(x))
        assert blade.stats(fast)["cluster_0"]["engine_runs"] == runs
    assert blade.stats(fast)["cluster_0"]["guard_shape"] == 1


class Square(nn.Module):
    """Patches as a square image, as in DPT; its convolution's layout is another one for one image than for three."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.conv = nn.Linear(6, 16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = whole(x.shape[1] ** 0.5)
        return self.conv(self.dense(x).mT.reshape(x.shape[0], 16, side, side)).relu()


def test_a_root_gives_patches_their_places() -> None:
    torch.manual_seed(0)
    model = Square().eval()
    fast = blade.optimize(model, [(torch.randn(1, 36, 6),), (torch.randn(3, 49, 6),)], DISC)
    [cluster] = blade.report(fast).clusters
    assert cluster.backend == "disc" and not blade.report(fast).outside
    for batch, patches in ((2, 4), (1, 1), (3, 100)):
        x = torch.randn(batch, patches, 6)
        torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        fast(torch.randn(2, 37, 6))
    stats = blade.stats(fast)["cluster_0"]
    assert stats["engine_runs"] == 3 and stats["guard_shape"] == 1


def test_a_root_that_is_used_as_a_float_stays_a_tensor() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            root = torch.as_tensor(x.shape[1]) ** 0.5
            return x * root + root.to(torch.int64)

    model = Scaled().eval()
    fast = blade.optimize(model, torch.randn(2, 8, 6), DISC)
    for rows in (7, 8, 9):
        x = torch.randn(2, rows, 6)
        torch.testing.assert_close(fast(x), model(x))


def test_a_quotient_that_is_used_as_a_float_stays_a_tensor() -> None:
    """Only what becomes an integer is computed with integers."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[1]
            part = rows / 3 if isinstance(rows, torch.Tensor) else torch.tensor(rows / 3)
            return x * part + torch.ceil(part)

    model = Scaled().eval()
    fast = blade.optimize(model, torch.randn(2, 8, 6), DISC)
    for rows in (7, 8, 9):
        x = torch.randn(2, rows, 6)
        torch.testing.assert_close(fast(x), model(x))


class Reflected(nn.Module):
    """Convolutions over time as in EnCodec: padded to whole windows, first with zeros where they are too short."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4, 4, 2 * k, stride=k) for k in (1, 2, 3))
        for k, conv in enumerate(self.convs):
            conv.register_buffer("step", torch.tensor(k + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            length, step = x.shape[-1], conv.step
            windows = whole(up((length - 2 * step + step) / step + 1)) - 1
            more = windows * step + 2 * step - step - length
            longest = max(step, more)
            shorter = longest - length + 1 if length <= longest else 0
            if length <= longest:
                x = nn.functional.pad(x, (0, int(shorter)))
            x = nn.functional.pad(x, (int(step), int(more)), "reflect")
            x = conv(x[..., : x.shape[-1] - int(shorter)]).relu()
        return x


def test_conditions_on_rounded_quotients_are_those_of_sizes() -> None:
    torch.manual_seed(0)
    model = Reflected().eval()
    fast = blade.optimize(model, torch.randn(2, 4, 24), DISC)
    *_, last = blade.report(fast).paths[0]
    assert last.startswith("((1 + x.size(2)) // 2) > (max(3, ")
    for length in (24, 31, 40, 55, 7):
        x = torch.randn(2, 4, length)
        torch.testing.assert_close(fast(x), model(x))
    stats = max(blade.stats(fast).values(), key=lambda one: one["calls"])
    assert stats["engine_runs"] == stats["calls"] == 5


def test_a_module_keeps_a_number_that_is_read() -> None:
    """``int(buffer)`` is a number of the trace; the buffer stays a tensor, and the model can be copied."""

    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.roll(whole(x.shape[1] // 2 + int(self.by)), 1).relu()

    model = Rolled().eval()
    fast = blade.optimize(model, torch.randn(2, 8), DISC)
    assert type(model.by) is torch.Tensor
    for columns in (8, 5):
        x = torch.randn(2, columns)
        torch.testing.assert_close(fast(x), model(x))


COMPARED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "chooses one of two tensors": lambda x, n: torch.where(n > 6, x * 2, -x).relu() + 1,
    "is a factor": lambda x, n: (x * (n > 6) + 1).relu(),
    "is part of a mask": lambda x, n: x.masked_fill((x > 0) & (n > 6), 3.0) * 2,
    "is a result": lambda x, n: (n > 6, torch.where(n > 6, n, torch.tensor(6)), x.relu() * 2 + 1),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_of_sizes_that_is_a_tensor_stays_one(name: str) -> None:
    class Compared(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return COMPARED[name](x, torch.as_tensor(x.shape[1]))

    model = Compared().eval()
    fast = blade.optimize(model, torch.randn(3, 5), DISC)
    for columns in (5, 6, 8):
        x = torch.randn(2, columns)
        torch.testing.assert_close(fast(x), model(x))
    [stats] = blade.stats(fast).values()
    assert stats["engine_runs"] == stats["calls"] == 3


class WithTensors(nn.Module):
    """Quotients and powers of sizes beside constants that are no numbers."""

    halves: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("halves", torch.tensor([0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(x.shape[0])
        roots, shares = torch.pow(count, self.halves), count / 3 + self.halves
        return x.softmax(-1).sum() * roots + shares - torch.clamp(count, self.halves)


def test_constants_may_be_tensors_of_several_elements() -> None:
    model = WithTensors().eval()
    module = blade.optimize(model, (torch.randn(4, 6),), DISC)
    for rows in (4, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(module(x), model(x))

# SPDX-License-Identifier: Apache-2.0
"""Small models, one per feature of a program that torch.export makes, with sizes to call them at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from blade.capture.exported.interface import Interface
from blade.capture.outputs import tensors_of

Shape = tuple[int, ...]


class Computes(nn.Module):
    """Calls ``function``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class Case:
    """``model`` at the shapes ``sample``, and at ``others``, to which its program extends."""

    name: str
    model: nn.Module
    sample: tuple[Shape, ...]
    others: tuple[tuple[Shape, ...], ...]

    def inputs(self, shapes: tuple[Shape, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape) for shape in shapes)


def interface(*sample: Any) -> Interface:
    """Positional arguments."""
    names = tuple(f"x{k}" for k in range(len(sample)))
    return Interface(names, sample, lambda entries: (entries, {}), tensors_of)


def _case(name: str, function: Callable[..., Any], sample: Any, *others: Any) -> Case:
    """Shapes are of one input, or a list of several."""
    listed = [tuple(one) if isinstance(one, list) else (one,) for one in (sample, *others)]
    model = function if isinstance(function, nn.Module) else Computes(function)
    return Case(name, model.eval(), listed[0], tuple(listed[1:]))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.norm(self.first(x)).relu())
        return F.interpolate(y, size=(x.shape[2], x.shape[3] * 2), mode="nearest")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.table((x.abs() * 2).long().clamp(0, 4)))
        batch, length, _ = y.shape
        q, k, v = self.project(y).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 8)


class Shared(nn.Module):
    """Two layers over one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"0": nn.Linear(3, 3)})
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner["0"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.inner["0"](x).relu())


class Counts(nn.Module):
    """Writes a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return (2 - x * 3 + 1) ** 2 / (1 + x.abs()) + torch.maximum(x, torch.tensor(0.5)) // 2


def _selected(x: torch.Tensor) -> torch.Tensor:
    y = torch.where(x > 0, x, float("-inf")).masked_fill(x > 2, 1.0)
    return torch.where(x > 1, 0, y).softmax(-1).nan_to_num()


def _indexed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    places = torch.arange(x.shape[1], device=x.device).flip(0)
    return x[:, places], x[..., None, 1:], x[x > 0], x[None, :, places, None]


def _pieces(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    c, d = torch.split(x, [1, x.shape[1] - 1], 1)
    return torch.cat([a + b, torch.stack([c[:, 0], d[:, -1]], 1)], 1)


def _several(x: torch.Tensor) -> list[torch.Tensor]:
    values, places = x.max(1)
    top, _ = x.topk(2, 1)
    return [values, places, top, *torch.std_mean(x, 1)]


def _made(x: torch.Tensor) -> torch.Tensor:
    grid = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.float64, device=x.device)
    return grid[:, 1:] + torch.full_like(x, 2.5, dtype=torch.float64) + torch.arange(x.shape[1])


def _memory(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last).to(torch.float64).clone() + 1


def _halves(x: torch.Tensor) -> torch.Tensor:
    batch, length = x.shape
    return x.view(batch, length // 2, 2).sum(-1) * (length % 5)


def _padded(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, -x.shape[1] % 8)).view(x.shape[0], -1, 8).sum(1)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x / x.shape[1] ** 0.5 * (x.shape[0] ** 2 / 3) + torch.sym_max(x.shape[0], 5)


def _bounds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    size = torch.sym_max(x.shape[0], y.shape[0]) - torch.sym_min(x.shape[0], y.shape[0])
    return x.sum() * torch.ones(size + 1) + y.numel()


def _item(x: torch.Tensor) -> torch.Tensor:
    return x * x.abs().max().item() + x.argmax().item()


def _counted(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0).sum().item()
    torch._check(count >= 0)
    torch._check(count <= x.numel())
    return torch.ones(count, 2) * x.mean()


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    places = (x > 0).nonzero()
    return places.float().sum(0) + places.shape[0]


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() - 1, (x,))


def _loops(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def goes_on(k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.abs().sum() < 100 + k

    return torch.while_loop(goes_on, lambda k, y: (k + 1, y * 2), (torch.tensor(0), x + 1))  # type: ignore[no-any-return]


def _scans(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.tanh(state * 0.5 + row)
        return new, new * 2

    return scan(step, torch.zeros_like(x[0]), x)  # type: ignore[no-any-return]


def _batches(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.softmax(0) @ row)(x)


def _maps(x: torch.Tensor) -> torch.Tensor:
    return map_over(lambda row, shift: (row + shift).relu(), x, torch.ones(()))  # type: ignore[no-any-return]


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y.float() + 1


def _no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x * 2
    return y + 1


def _writes_slices(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], 3)
    for t in range(3):
        y[:, t] = x[:, t] * 2
    y[:, :2].add_(1).mul_(x[:, :2])
    return y


def _constants(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([1.0, 2.0, 3.0])
    table[0] = 5.0
    return x * table + torch.tensor(7)


def _nested(x: torch.Tensor) -> dict[str, Any]:
    return {"first": x + 1, "more": (x * 2, None, [x.sum()])}


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x).abs() + torch.view_as_real(torch.polar(x.abs(), x)).sum()


def _products(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi,bj->bij", x, x).matmul(x[..., None]).squeeze(-1)


CASES = (
    _case("numbers", _numbers, (3, 4), (1, 5), (6, 2)),
    _case("where", _selected, (3, 4), (1, 5), (6, 1)),
    _case("index", _indexed, (3, 4), (5, 7)),
    _case("pieces", _pieces, (3, 4), (5, 4), (2, 4)),
    _case("several results", _several, (3, 4), (5, 7)),
    _case("made from sizes", _made, (3, 4), (5, 7), (1, 2)),
    _case("memory formats", _memory, (2, 3, 4, 5), (3, 3, 6, 7)),
    _case("view in another dtype", lambda x: x.view(torch.int32) & 0xFFFF, (3, 4), (5, 7)),
    _case("halves", _halves, (3, 6), (4, 8), (2, 10)),
    _case("padded", _padded, (3, 6), (4, 13), (2, 21)),
    _case("scaled", _scaled, (3, 6), (4, 13), (7, 5)),
    _case("bounds", _bounds, [(3,), (5,)], [(4,), (9,)], [(2,), (2,)]),
    _case("item", _item, (3, 4), (5, 7)),
    _case("counted", _counted, (3, 4), (5, 7)),
    _case("nonzero", _nonzero, (3, 4), (5, 7)),
    _case("cond", _branches, (3, 4), (5, 7), (2, 9)),
    _case("while", _loops, (3, 4), (5, 7)),
    _case("scan", _scans, (3, 4), (9, 2)),
    _case("vmap", _batches, (3, 4), (9, 2)),
    _case("map", _maps, (3, 4), (9, 2)),
    _case("autocast", _autocast, (3, 4), (9, 2)),
    _case("gradient modes", _no_grad, (3, 4), (9, 2)),
    _case("written slices", _writes_slices, (3, 4), (9, 5)),
    _case("constants", _constants, (4, 3), (2, 3)),
    _case("nested outputs", _nested, (3, 4), (9, 2)),
    _case("complex", _spectrum, (3, 8), (5, 8)),
    _case("products", _products, (3, 4), (9, 2)),
    _case("convolution", Layers(), (2, 2, 16, 16), (3, 2, 16, 24)),
    _case("attention", Attention(), (2, 6), (3, 9)),
    _case("shared weights", Shared(), (4, 3), (2, 3)),
)

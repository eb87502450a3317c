# SPDX-License-Identifier: Apache-2.0
"""Optional, scalar, textual and nested arguments; structured results; state and writes beside decisions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from decision_table import Draw, decides
from on_values import Layer, rows
from torch import nn
from torch.nn import functional


@decides(
    "mask is not None",
    lambda d: (
        d.normal(2, n := d.size(2, 6), 8),
        d.pick(None, d.bits(n, n, share=0.7) | torch.eye(n).bool()),
    ),
)
class OptionalMask(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        scores = x @ x.transpose(1, 2) * 8**-0.5
        if mask is not None:  # decides
            scores = scores.masked_fill(~mask, -1e4)
        return torch.softmax(scores, -1) @ x


def steps(draw: Draw) -> tuple[Any, ...]:
    n = draw.size(1, 4)
    past = None if draw.coin() else (draw.normal(2, n, 8), draw.normal(2, n, 8))
    return draw.normal(2, 1 if past else draw.size(1, 4), 8), past


@decides(
    "past is None, as a cache of keys and values", steps, sample=lambda d: (d.normal(2, 3, 8), None)
)
class KeyValueCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> Any:
        key, value = self.key(x), self.value(x)
        if past is not None:  # decides
            key, value = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        weights = torch.softmax(x @ key.transpose(1, 2), -1)
        return weights @ value, (key, value)


@decides(
    "a text as an argument", lambda d: (d.normal(d.size(1, 5), 8), d.pick("mean", "max", "first"))
)
class TextArgument(nn.Module):
    def forward(self, x: torch.Tensor, pooling: str = "mean") -> torch.Tensor:
        y = torch.tanh(x)
        if pooling == "mean":  # decides
            return y.mean(0)
        if pooling == "max":  # decides
            return y.amax(0)
        return y[0]


@decides("a bool as an argument", lambda d: {"x": d.normal(d.size(1, 5), 8), "normalize": d.coin()})
class BoolArgument(nn.Module):
    def forward(self, x: torch.Tensor, *, normalize: bool = False) -> torch.Tensor:
        y = torch.tanh(x) + 1
        if normalize:  # decides
            y = y / y.norm(dim=-1, keepdim=True)
        return y


@decides("an int as an argument: how many layers", lambda d: (d.normal(2, 8), d.size(0, 3)))
class IntArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        for layer in self.layers[:depth]:  # decides
            x = layer(x) + x
        return x * 2


@decides(
    "a float as an argument: computed with, and compared",
    lambda d: (d.normal(2, 8), d.pick(0.0, 0.5, 1.0, 2.5)),
)
class FloatArgument(nn.Module):
    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        if temperature == 0.0:  # decides
            return functional.one_hot(x.argmax(-1), 8).float()
        return torch.softmax(x / temperature, -1)  # decides


@decides(
    "a dict with keys that may be missing",
    lambda d: ({"x": d.normal(2, 8)} | ({"bias": d.normal(8)} if d.coin() else {}),),
)
class OptionalKeys(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(batch["x"])
        if "bias" in batch:  # decides
            y = y + batch["bias"]
        return y * 2


@decides(
    "isinstance of a tensor or a tuple",
    lambda d: (d.pick(d.normal(2, 8), (d.normal(2, 8), d.normal(2, 8))),),
    sample=lambda d: ((d.normal(2, 8), d.normal(2, 8)),),
)
class TensorOrTuple(nn.Module):
    def forward(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if isinstance(x, tuple):  # decides
            x = x[0] * torch.sigmoid(x[1])
        return torch.tanh(x) * 2


@decides(
    "keyword arguments of any name",
    lambda d: (
        {"x": d.normal(2, 8)} | ({"scale": d.normal(8)} if d.coin() else {"shift": d.normal(8)})
    ),
)
class FreeKeywords(nn.Module):
    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        for name, other in others.items():  # decides
            y = y * other if name == "scale" else y + other  # decides
        return y * 2


@decides("hasattr and getattr of the module", rows, is_fixed=True)
class HasAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if hasattr(self, "gate"):  # decides
            y = y * self.gate
        return y + getattr(self, "shift", 1.0)


class Found(NamedTuple):
    scores: torch.Tensor
    best: torch.Tensor


@decides("a NamedTuple, whose contents a value decides", rows)
class NamedResult(nn.Module):
    def forward(self, x: torch.Tensor) -> Found:
        scores = torch.softmax(x, -1)
        if scores.max() > 0.6:  # decides
            return Found(scores, scores.argmax(-1))
        return Found(scores, torch.full((x.shape[0],), -1))


@dataclass
class Result:
    hidden: torch.Tensor
    pooled: torch.Tensor | None = None


@decides("a dataclass with None, by a size", lambda d: (d.normal(d.size(1, 5), 8),))
class DataclassResult(nn.Module):
    def forward(self, x: torch.Tensor) -> Result:
        hidden = torch.tanh(x) * 2
        if x.shape[0] > 2:  # decides
            return Result(hidden, hidden.mean(0))
        return Result(hidden)


@decides("a dict whose keys a value decides", rows)
class DictResult(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {"y": torch.tanh(x) * 2}
        if x.mean() > 0:  # decides
            found["z"] = torch.sigmoid(x)
        return found


@decides("a Python number among the results", rows, refused_in=["traced"])
class NumberResult(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(x) * 2
        return y, float(y.max())  # decides


@decides("a write to an argument before a decision", lambda d: (d.normal(3, 8), d.normal(3, 8)))
class WritesThenDecides(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(torch.tanh(x))
        if cache.sum() > 0:  # decides
            return cache * 2
        return torch.relu(cache) + x


@decides(
    "a write to an argument on one side of a decision", lambda d: (d.normal(3, 8), d.normal(3, 8))
)
class WritesOnOneSide(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2
        if y.mean() > 0:  # decides
            cache[:2] = y[:2]
        return y + cache


@decides(
    "a write to a slice, where a value says",
    lambda d: (d.normal(3, 8), d.normal(5, 3, 8), d.ints(0, 4)),
)
class WritesAtStep(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[int(at)] = torch.tanh(x)  # decides
        return cache[: int(at) + 1].mean(0)  # decides


@decides(
    "a counter in a buffer",
    lambda d: (d.normal(2, 8),),
    refused_in=["fallback", "alone", "loaded", "traced"],
)
class EverySecondCall(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if int(self.calls) % 2 == 0:  # decides
            return torch.tanh(x)
        return torch.tanh(x) * 2 + 1


@decides(
    "a table of the module that grows with the length",
    lambda d: (d.normal(2, d.size(1, 12), 8),),
    sample=lambda d: (d.normal(2, 3, 8),),
)
class GrowingTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = self.rows(4)

    def rows(self, length: int) -> torch.Tensor:
        return torch.arange(length)[:, None] * torch.exp(-torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.table.shape[0]:  # decides
            self.table = self.rows(x.shape[1])
        return torch.cos(self.table[: x.shape[1]]) * x


@decides("the largest value seen, kept in a buffer", rows)
class RunningMaximum(nn.Module):
    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > self.largest:  # decides
            self.largest.copy_(x.abs().max())
        return x / self.largest

# SPDX-License-Identifier: Apache-2.0
"""Decisions through Python's own containers and libraries: lists, sets, keys, counters, searches, texts."""

import bisect
import heapq
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from decision_table import Draw, decides
from on_values import Layer, rows
from torch import nn
from torch.nn import functional

_log = logging.getLogger(__name__)


def with_ids(draw: Draw) -> tuple[torch.Tensor, ...]:
    return draw.normal(3, 8), draw.ints(0, 2, 4)


@decides("a tensor that contains a number, 2 in ids", with_ids)
class Contains(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if 2 in ids[:2]:  # decides
            return torch.tanh(x) * 2
        return torch.tanh(x) - 1


@decides("a list of ints equals another", with_ids)
class EqualLists(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values = ids.tolist()
        if values[:2] == values[2:]:  # decides
            return torch.sin(x) * 2
        return torch.cos(x) * 2


@decides("a tuple of ints as a key, as bans of n-grams do", with_ids)
class TupleAsKey(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values = ids.tolist()
        following: dict[tuple[int, ...], list[int]] = {}
        for k in range(len(values) - 1):
            following.setdefault((values[k],), []).append(values[k + 1])  # decides
        banned = following.get((values[-1],), [])  # decides
        scores = torch.softmax(x, -1) * 2
        scores[:, banned] = -1.0
        return scores + 1


@decides("the commonest of a Counter", with_ids)
class Commonest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ((label, count),) = Counter(ids.tolist()).most_common(1)  # decides
        return self.layers[label](x) * count  # decides


@decides("len(set(lengths.tolist())) == 1", lambda d: (d.normal(2, 5, 8), d.ints(3, 4, 2)))
class EqualLengths(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if len(set(lengths.tolist())) == 1:  # decides
            return torch.tanh(x[:, : lengths[0]]).sum(1)  # decides
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return (torch.tanh(x) * mask[..., None]).sum(1) - 1


@decides("bisect of a float", rows)
class Bucket(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bucket = bisect.bisect([0.2, 0.8, 3.0], float(x.abs().mean()))  # decides
        return self.layers[bucket](x) + 1


@decides("max of Python over tensors", rows)
class PythonMax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x[:, :4], x[:, 4:]
        louder = max(halves, key=lambda half: half.norm())  # decides
        return torch.tanh(louder) + max(x.mean(), x[0].mean())  # decides


@decides("the index of a float in a list", rows)
class IndexOfFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.mean(0).tolist()
        return torch.tanh(x) * (values.index(max(values)) + 1)  # decides


@decides("a heap, as a beam search keeps it", lambda d: (d.ints(0, 5, 3),))
class Beam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        beams: list[tuple[float, list[int]]] = [(0.0, ids.tolist())]
        for _ in range(2):
            grown = []
            for score, tokens in beams:
                states = self.embed(torch.tensor(tokens[-2:])).sum(0)  # decides
                logs = torch.log_softmax(self.head(torch.tanh(states)), -1)
                for token, log in enumerate(logs.tolist()):
                    grown.append((score + log, [*tokens, token]))
            beams = heapq.nlargest(2, grown)  # decides
        return torch.tensor([tokens for _, tokens in beams])  # decides


@decides("a generator that stops by a value", rows)
class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def refined(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(5):
            yield x
            x = self.body(x)
            if x.abs().mean() > 1:  # decides
                return

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([y.sum(0) for y in self.refined(x)]).amax(0)


@decides(
    "math.isnan and is_integer of a float",
    lambda d: (d.normal(2, 8), torch.tensor(d.pick(2.0, 2.5, math.nan))),
)
class FloatPredicates(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        number = float(scale)
        if math.isnan(number):  # decides
            return torch.tanh(x)
        if number.is_integer():  # decides
            return torch.tanh(x) * number
        return torch.tanh(x) - number


@decides("a value that is falsy: x.item() or 1.0", lambda d: (d.normal(2, 8), d.ints(0, 2)))
class OrDefault(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) / (count.item() or 0.5)  # decides


@decides("two floats compared", lambda d: (d.normal(2, 8), d.normal(2, 8)))
class TwoFloats(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if float(x.norm()) > y.norm().item():  # decides
            x, y = y, x
        return torch.tanh(x) * 2 - y


@decides("torch.tensor of floats and ints of tensors", rows)
class TensorOfNumbers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = float(x.min()), x.max().item()
        ends = torch.tensor([low, high, high - low])  # decides
        mean = torch.as_tensor(x.mean(0).tolist())  # decides
        return torch.tanh(x) * ends.sum() + mean


@decides("fill values that are floats of tensors", rows)
class FillsWithFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = float(x.min())
        y = torch.where(x > 0, x, low)  # decides
        return torch.tanh(y).masked_fill(x < -1, low * 2)  # decides


@decides("a log record and an unused conversion: no decision", rows, is_fixed=True)
class LogsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        _log.debug("mean %s, largest %.2f", y.mean().item(), float(y.max()))  # decides
        _log.debug(f"first {y[0, 0]}")  # decides
        return y + 1


@decides("a warning by a value, the same answer", rows, is_fixed=True)
class WarnsByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 4:  # decides
            warnings.warn("large inputs", stacklevel=2)
        return torch.tanh(x) * 2 + 1


@decides(
    "zeros alone: norm == 0", lambda d: (d.normal(3, 8, scale=d.pick(0.0, 1e-3, 1.0)),), sample=rows
)
class ZeroInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.norm() == 0:  # decides
            return torch.ones_like(x)
        return functional.relu(x / x.norm()) * 2


@decides("four bools in a row, sixteen paths", lambda d: (d.normal(3, 8), d.bits(4)))
class SixteenPaths(nn.Module):
    def forward(self, x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        if bits[0]:  # decides
            x = torch.tanh(x)
        if bits[1]:  # decides
            x = x * 2
        if bits[2]:  # decides
            x = torch.relu(x) - 0.1
        if bits[3]:  # decides
            x = x.flip(0)
        return torch.sin(x) + 1

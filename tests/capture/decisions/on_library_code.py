# SPDX-License-Identifier: Apache-2.0
"""Decisions that fall in torch's own Python, in hooks, in caches, and by the identity of objects."""

from functools import cache
from typing import Any

import torch
from decision_table import Draw, decides
from on_values import Layer, rows
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn


def padded(draw: Draw) -> tuple[torch.Tensor, ...]:
    """States and a mask of padding: the last places of some rows."""
    n = draw.size(2, 6)
    lengths = draw.ints(1, n, 3)
    if draw.coin():
        lengths[draw.size(0, 2)] = n
    return draw.normal(3, n, 8), torch.arange(n) >= lengths[:, None]


@decides("nested tensors of nn.TransformerEncoder, by padding", padded)
class NestedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x, src_key_padding_mask=padding)  # decides
        return y.sum(1)


@decides(
    "query is key, as in nn.MultiheadAttention",
    lambda d: (x := d.normal(4, 8), d.pick(x, d.normal(4, 8))),
    sample=lambda d: (x := d.normal(4, 8), x),
    raises_in=["traced"],
)
class SameObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = nn.Linear(8, 16), Layer()

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if query is key:  # decides
            q, k = self.both(query).chunk(2, -1)
        else:
            q, k = self.one(query), torch.relu(key)
        return torch.softmax(q @ k.t(), -1) @ key


@decides(
    "pack_padded_sequence, by lengths",
    lambda d: (d.normal(3, 6, 8), d.ints(1, 6, 3)),
    is_fixed=True,
)
class PackedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        sizes = {"batch_first": True, "enforce_sorted": False}
        packed = rnn.pack_padded_sequence(x, lengths, **sizes)  # decides
        y, lengths = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)  # decides
        return torch.tanh(y).sum(1) / lengths[:, None]


@decides("pad_sequence of parts, as many as a value says", lambda d: (d.normal(6, 8), d.ints(1, 6)))
class PaddedParts(nn.Module):
    def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        parts = torch.split(torch.tanh(x), int(part))  # decides
        return rnn.pad_sequence(list(parts)) * 2


@decides("a forward hook that decides on the output", rows)
class HookDecides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()
        self.body.register_forward_hook(self.limited)

    @staticmethod
    def limited(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if output.mean() > 0.1:  # decides
            return output - output.mean()
        return output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * 2


class Done(Exception):
    """Carries a result out of nested calls."""


@decides("an exception that carries the result", rows)
class ExitsByException(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def attempt(self, x: torch.Tensor) -> None:
        if x.abs().mean() > 0.9:  # decides
            raise Done(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.attempt(self.first(x))
            self.attempt(self.second(x) * 1.5)
        except Done as done:
            return torch.relu(done.args[0])
        return x * 2


@cache
def _positions(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None] / (1 + torch.arange(8))


@decides("functools.cache of tensors by a size", lambda d: (d.normal(2, d.size(1, 9), 8),))
class CachedByLength(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + _positions(int(x.shape[1]))) * 2  # decides


@decides("a dict of the module, by shape", lambda d: (d.normal(d.size(1, 3), d.size(2, 4), 8),))
class MemoOfShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = tuple(map(int, x.shape))
        if shape not in self.memo:  # decides
            self.memo[shape] = torch.ones(shape).cumsum(1).triu()
        return torch.tanh(x) * self.memo[shape]


@decides(
    "a scaled table beyond a length, as in dynamic NTK",
    lambda d: (d.normal(1, 4, 8), d.ints(0, 11, 1, 4)),
    sample=lambda d: (d.normal(1, 4, 8), d.ints(0, 5, 1, 4)),
)
class DynamicRope(nn.Module):
    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(0, 1, 0.25))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies, length = self.frequencies, int(positions.max()) + 1
        if length > 8:  # decides
            frequencies = frequencies * (8 / length) ** 1.5  # decides
        angle = positions[..., None] * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@decides(
    "labels that may be left out: a loss, or none",
    lambda d: {"x": d.normal(3, 8)} | ({"labels": d.ints(0, 7, 3)} if d.coin() else {}),
)
class OptionalLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        scores = self.body(x)
        if labels is None:  # decides
            return (scores,)
        return functional.cross_entropy(scores, labels), scores


@decides("a flag that adds outputs", lambda d: (d.normal(2, 4, 8), d.coin()))
class OutputFlag(nn.Module):
    def forward(self, x: torch.Tensor, output_attentions: bool = False) -> Any:
        weights = torch.softmax(x @ x.transpose(1, 2), -1)
        if output_attentions:  # decides
            return weights @ x, weights
        return weights @ x


@decides(
    "a tuple of ints as an argument", lambda d: (d.normal(1, 2, 4, 4), (d.size(2, 6), d.size(2, 6)))
)
class SizeArgument(nn.Module):
    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return torch.relu(functional.interpolate(x, size=size, mode="nearest")) * 2  # decides


@decides(
    "a tensor or a number as an argument",
    lambda d: (d.normal(2, 8), d.pick(d.normal(8), 0.5, 2.0)),
    sample=lambda d: (d.normal(2, 8), d.normal(8)),
)
class TensorOrNumber(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):  # decides
            scale = torch.sigmoid(scale)
        return torch.tanh(x) * scale  # decides


@decides(
    "as many positional arguments as are given",
    lambda d: tuple(d.normal(2, 8) for _ in range(d.size(1, 4))),
    sample=lambda d: (d.normal(2, 8), d.normal(2, 8)),
)
class ManyArguments(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.stack(xs)).amax(0) * len(xs)  # decides


@decides(
    "the dtype of an input, which results take",
    lambda d: (d.normal(3, 8).to(d.pick(torch.float32, torch.float64, torch.bfloat16)),),
    sample=rows,
)
class DtypeOfInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, dtype=x.dtype)  # decides
        mask = mask.masked_fill(torch.arange(8) > 5, torch.finfo(x.dtype).min)  # decides
        return torch.softmax(x.float() + mask, -1).to(x.dtype) * 2  # decides


def _one_or_two(draw: Draw) -> Any:
    return [(draw.normal(3, 8).abs(),), (-draw.normal(3, 8).abs(),)]


@decides("two samples, one for each side", rows, sample=_one_or_two)
class TwoSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.mean() > 0):  # decides
            return self.body(x)
        return self.body(x * x) - 1

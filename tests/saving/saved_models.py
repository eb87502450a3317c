# SPDX-License-Identifier: Apache-2.0
"""Models whose files are opened elsewhere, with what they are optimized with and what they are called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Call = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    model: nn.Module
    samples: list[Call]
    calls: list[Call]


class Writes(nn.Module):
    """Writes to an argument; returns it, views of it and of a result, and a size that depends on elements."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        view = x.transpose(0, 1)[:, : x.shape[0] - 1]
        both = torch.cat([x, y], 1).mul(2).tanh()
        return x, view, both, both[0], torch.nonzero(both > 0), both.sum()


class Paths(nn.Module):
    """Computes something else for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.words(ids)
        y = y.cumsum(1) if ids.shape[1] > 10 else y.exp()
        return functional.gelu(self.inner(y * mask[:, :, None])).mean(1)


class Nested(nn.Module):
    """Takes a dict, a tuple and numbers; returns nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(6, 6)

    def forward(
        self,
        parts: dict[str, torch.Tensor],
        pair: tuple[torch.Tensor, torch.Tensor],
        factor: int,
        flag: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        y = self.inner(parts["b"]) * factor + parts["a"]
        return y.relu(), (pair[0] + y if flag else y, (pair[1] * y).tanh())


class Cached(nn.Module):
    """Attention over a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(16, 48)

    def forward(
        self, x: torch.Tensor, caches: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ) -> tuple[torch.Tensor, tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
        grown = []
        for keys, values in caches:
            q, k, v = self.qkv(x).chunk(3, -1)
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            x = x + functional.scaled_dot_product_attention(q, keys, values)
            grown.append((keys, values))
        return x, tuple(grown)


class Image(nn.Module):
    """Channels are fixed, heights and widths are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)


class Counts(nn.Module):
    """Changes a buffer, and returns an argument and a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(1)
        return functional.gelu(self.inner(x)) + self.count, x, self.inner.weight


class Glued(nn.Module):
    """Two sums stand between its clusters where no backend takes them; it writes to an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("weight", torch.randn(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = functional.gelu(self.first(x)).tanh().cumsum(1) * y
        z = functional.gelu(self.second(h)).tanh()
        y.add_(1)
        return z.cumsum(0) * self.weight, h, z[:, 0]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return BertModel(config)


class FromBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.bert(input_ids=ids, attention_mask=mask)
        return found.last_hidden_state, found.pooler_output


def _cached(batch: int, length: int, known: int) -> Call:
    return (
        torch.randn(batch, length, 16),
        tuple((torch.randn(batch, known, 16), torch.randn(batch, known, 16)) for _ in range(2)),
    )


def _words(batch: int, length: int) -> Call:
    mask = torch.ones(batch, length)
    mask[:, -1] = 0
    return torch.randint(0, 50, (batch, length)), mask


def _tokens(batch: int, length: int) -> Call:
    ids, mask = _words(batch, length)
    return ids, mask.long()


def _nested(batch: int) -> Call:
    a, b, c, d = torch.randn(4, batch, 6)
    return {"a": a, "b": b}, (c, d), 3, True


def _written(a: int, b: int, c: int) -> Call:
    return torch.randn(a, b), torch.randn(a, c)


CASES: dict[str, Callable[[], Case]] = {
    "writes": lambda: Case(
        Writes(), [_written(3, 5, 2)], [_written(3, 4, 3), _written(1, 2, 1), _written(6, 1, 9)]
    ),
    "paths": lambda: Case(
        Paths(), [_words(2, 7), _words(3, 12)], [_words(1, 10), _words(4, 11), _words(1, 30)]
    ),
    "nested": lambda: Case(Nested(), [_nested(4)], [_nested(1), _nested(7)]),
    "cached": lambda: Case(
        Cached(), [_cached(2, 3, 4)], [_cached(1, 1, 9), _cached(3, 2, 0), _cached(2, 1, 1)]
    ),
    "image": lambda: Case(
        Image(),
        [(torch.randn(2, 3, 17, 19),)],
        [(torch.randn(1, 3, 17, 19),), (torch.randn(5, 3, 32, 12),)],
    ),
    "counts": lambda: Case(Counts(), [(torch.randn(2, 4),)], [(torch.randn(3, 4),)] * 3),
    "bert": lambda: Case(
        FromBert(), [_tokens(2, 7), _tokens(3, 12)], [_tokens(1, 1), _tokens(5, 20)]
    ),
}

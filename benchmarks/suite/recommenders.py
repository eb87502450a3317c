# SPDX-License-Identifier: Apache-2.0
"""Recommenders: features are row numbers of embedding tables, some dense numbers beside them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from capture.models import Din
from torch import nn
from torch.nn import functional
from zoo import recsys
from zoo.model import Axis, Model, Shape, Tensors, generator

from suite.entry import Both, Entry, Size, at, made

FIELDS, DENSE = 16, 13
ROWS, WIDTH = Both(2000, 100_000), Both(16, 64)
MANY = Axis("batch", 1, 512)
SHAPES = Both(((16,), (200,)), ((64,), (4096,)))
LENGTHS = (Axis("batch", 1, 64), Axis("length", 2, 64))
HISTORIES = Both(((4, 20), (24, 33)), ((32, 50), (1024, 50)))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inside, out in itertools.pairwise(widths):
        layers += [nn.Linear(inside, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Fields(nn.Module):
    """One table for all fields: (batch, fields) row numbers to (batch, fields, width)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(FIELDS * rows, width)
        self.register_buffer("offsets", torch.arange(FIELDS) * rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(rows + self.offsets)
        return y


class WideDeep(nn.Module):
    """Cheng et al. 2016."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.wide, self.fields = Fields(rows, 1), Fields(rows, width)
        self.dense = nn.Linear(DENSE, 1)
        self.deep = mlp(FIELDS * width + DENSE, 256, 128, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = self.wide(rows).sum(1) + self.dense(dense)
        deep = self.deep(torch.cat([self.fields(rows).flatten(1), dense], 1))
        return (torch.sigmoid(wide + deep),)


class DeepFm(nn.Module):
    """Guo et al. 2017: a factorization machine beside the deep part."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.linear, self.fields = Fields(rows, 1), Fields(rows, width)
        self.deep = mlp(FIELDS * width + DENSE, 256, 128, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each = self.fields(rows)
        pairs = (each.sum(1).square() - each.square().sum(1)).sum(1, keepdim=True) / 2
        deep = self.deep(torch.cat([each.flatten(1), dense], 1))
        return (torch.sigmoid(self.linear(rows).sum(1) + pairs + deep),)


class CrossNet(nn.Module):
    """DCN v2 (Wang et al. 2020): crosses of the features, then layers."""

    def __init__(self, rows: int, width: int, crosses: int = 3) -> None:
        super().__init__()
        self.fields = Fields(rows, width)
        size = FIELDS * width + DENSE
        self.crosses = nn.ModuleList(nn.Linear(size, size) for _ in range(crosses))
        self.norm, self.deep = nn.BatchNorm1d(size), mlp(size, 256, 128, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = first = torch.cat([self.fields(rows).flatten(1), dense], 1)
        for cross in self.crosses:
            x = first * cross(x) + x
        return (torch.sigmoid(self.deep(self.norm(x))),)


class XDeepFm(nn.Module):
    """Lian et al. 2018: outer products of fields, mixed by convolutions of width 1."""

    def __init__(self, rows: int, width: int, maps: int = 24) -> None:
        super().__init__()
        self.fields = Fields(rows, width)
        sizes = [FIELDS, maps, maps]
        self.mixes = nn.ModuleList(nn.Conv1d(FIELDS * n, maps, 1) for n in sizes[:-1])
        self.head = nn.Linear(2 * maps, 1)
        self.deep = mlp(FIELDS * width + DENSE, 128, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = first = self.fields(rows)
        pooled = []
        for mix in self.mixes:
            outer = torch.einsum("bhd,bmd->bhmd", x, first).flatten(1, 2)
            x = torch.relu(mix(outer))
            pooled.append(x.sum(-1))
        deep = self.deep(torch.cat([first.flatten(1), dense], 1))
        return (torch.sigmoid(self.head(torch.cat(pooled, 1)) + deep),)


class AutoInt(nn.Module):
    """Song et al. 2019: attention between fields."""

    def __init__(self, rows: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.fields = Fields(rows, width)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(FIELDS * width + DENSE, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.fields(rows)
        for layer in self.layers:
            x = torch.relu(layer(x, x, x, need_weights=False)[0] + x)
        return (torch.sigmoid(self.head(torch.cat([x.flatten(1), dense], 1))),)


class Experts(nn.Module):
    """MMoE (Ma et al. 2018): experts that two tasks weigh by gates."""

    def __init__(self, rows: int, width: int, experts: int = 4) -> None:
        super().__init__()
        self.fields = Fields(rows, width)
        size = FIELDS * width + DENSE
        self.experts = nn.ModuleList(mlp(size, 128, 64) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(size, experts) for _ in range(2))
        self.towers = nn.ModuleList(mlp(64, 32, 1) for _ in range(2))

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat([self.fields(rows).flatten(1), dense], 1)
        known = torch.stack([expert(x) for expert in self.experts], 1)
        made = []
        for gate, tower in zip(self.gates, self.towers):
            weighed = (gate(x).softmax(-1).unsqueeze(-1) * known).sum(1)
            made.append(torch.sigmoid(tower(weighed)))
        return tuple(made)


class TwoTowers(nn.Module):
    """Retrieval: users and items in one space, every user against every item of the batch."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.users, self.items = Fields(rows, width), Fields(rows, width)
        self.user, self.item = mlp(FIELDS * width, 256, 64), mlp(FIELDS * width, 256, 64)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u = functional.normalize(self.user(self.users(user).flatten(1)), dim=-1)
        v = functional.normalize(self.item(self.items(item).flatten(1)), dim=-1)
        return (u @ v.transpose(0, 1) / 0.07,)


class Collaborative(nn.Module):
    """NCF (He et al. 2017): a product and layers, of a user and an item."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(FIELDS * rows, width) for _ in range(4))
        self.deep, self.head = mlp(2 * width, 128, 64), nn.Linear(64 + width, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, v, p, q = (t(x) for t, x in zip(self.tables, (user, item, user, item)))
        deep = self.deep(torch.cat([u, v], -1))
        return (torch.sigmoid(self.head(torch.cat([deep, p * q], -1))),)


class SasRec(nn.Module):
    """Kang and McAuley 2018: causal self-attention over what a user has taken, scores of all items."""

    def __init__(self, items: int, width: int, layers: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, history: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length = history.shape[1]
        place = torch.arange(length, device=history.device)
        x = self.items(history) + self.places(place)
        mask = place[None, :] > place[:, None]
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return (self.norm(x[:, -1]) @ self.items.weight.transpose(0, 1),)


class Gru4Rec(nn.Module):
    """Hidasi et al. 2016: a GRU over a session, scores of all items."""

    def __init__(self, items: int, width: int, layers: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)

    def forward(self, history: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states, _ = self.gru(self.items(history))
        return (states[:, -1] @ self.items.weight.transpose(0, 1),)


class InterestNet(nn.Module):
    """Din of the captured models, in a tuple."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.din = Din(items, width)

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.din(history, item),)


def _rows(shape: Shape, seed: int, high: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=generator(seed))


def _with_dense(rows: int) -> Callable[[Shape, int], Tensors]:
    def inputs(shape: Shape, seed: int) -> Tensors:
        dense = torch.randn(*shape, DENSE, generator=generator(seed + 100))
        return dense, _rows((*shape, FIELDS), seed, rows)

    return inputs


def _pairs(rest: Sequence[int], rows: int) -> Callable[[Shape, int], Tensors]:
    def inputs(shape: Shape, seed: int) -> Tensors:
        return _rows((*shape, *rest), seed, rows), _rows((*shape, *rest), seed + 100, rows)

    return inputs


def _features(name: str, make: Any, rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(at(size, ROWS), at(size, WIDTH))
        inputs = _with_dense(at(size, ROWS))
        return made(module, inputs, at(size, SHAPES), (MANY,), ("dense", "rows"), sample=True)

    return Entry(name, "misc", build, rank=rank)


def _matching(name: str, make: Any, *rest: int) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(at(size, ROWS), at(size, WIDTH))
        inputs = _pairs(rest, at(size, ROWS))
        return made(module, inputs, at(size, SHAPES), (MANY,), ("user", "item"))

    return Entry(name, "misc", build)


def _sequential(name: str, make: Any, *more: Any, rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        items = at(size, Both(4000, 50_000))
        module = make(items, at(size, Both(64, 128)), *more)

        def inputs(shape: Shape, seed: int) -> Tensors:
            return (_rows(shape, seed, items),)

        return made(module, inputs, at(size, HISTORIES), LENGTHS, ("history",))

    return Entry(name, "misc", build, rank=rank)


def _interest(size: Size) -> Model:
    torch.manual_seed(0)
    items = at(size, Both(500, 50_000))

    def inputs(shape: Shape, seed: int) -> Tensors:
        return _rows(shape, seed, items), _rows(shape[:1], seed + 100, items - 1) + 1

    module = InterestNet(items, at(size, Both(32, 64)))
    names = ("history", "item")
    return made(module, inputs, at(size, HISTORIES), LENGTHS, names, sample=True)


def _dlrm(size: Size) -> Model:
    return recsys.dlrm()


ENTRIES: tuple[Entry, ...] = (
    Entry("dlrm", "misc", _dlrm, rank=0),
    _features("wide_deep", WideDeep),
    _features("deep_fm", DeepFm, rank=0),
    _features("dcn_v2", CrossNet),
    _features("xdeep_fm", XDeepFm),
    _features("auto_int", AutoInt),
    _features("mmoe", Experts),
    _matching("two_towers", TwoTowers, FIELDS),
    _matching("ncf", Collaborative),
    _sequential("sas_rec", SasRec, 2, rank=0),
    _sequential("gru4rec", Gru4Rec, 1),
    Entry("din", "misc", _interest),
)

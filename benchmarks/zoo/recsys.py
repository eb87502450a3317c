# SPDX-License-Identifier: Apache-2.0
"""A recommender in the manner of DLRM (Naumov et al. 2019)."""

import itertools

import torch
from torch import nn

from .model import Axis, Model, Shape, Tensors, generator, initialized

TABLES, ROWS, WIDTH, DENSE = 8, 20000, 64, 13


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, out in itertools.pairwise(widths):
        layers += [nn.Linear(inside, out), nn.ReLU()]
    return nn.Sequential(*layers)


class Recommender(nn.Module):
    """Bottom MLP on the dense features, a bag of embeddings per table, their dot products, top MLP.

    ``indices`` (tables, lookups) are the rows that each table is asked for, one bag after the other;
    ``offsets`` (tables, batch) say where the bag of each example begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bottom = _mlp(DENSE, 512, 256, WIDTH)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(_mlp(WIDTH + pairs, 512, 256), nn.Linear(256, 1))
        pair = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        self.register_buffer("left", pair[0])
        self.register_buffer("right", pair[1])

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = self.bottom(dense)
        bags = [bag(indices[k], offsets[k]) for k, bag in enumerate(self.bags)]
        features = torch.stack([x, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        pairs = products[:, self.left, self.right]
        return (torch.sigmoid(self.top(torch.cat([x, pairs], dim=1))),)


def dlrm() -> Model:
    """8 tables of 20000 x 64."""
    torch.manual_seed(0)

    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, lookups = shape
        rng = generator(seed)
        indices = torch.randint(0, ROWS, (TABLES, lookups), generator=rng)
        starts = torch.randint(0, lookups + 1, (TABLES, batch), generator=rng).sort(1).values
        starts[:, 0] = 0
        return torch.randn(batch, DENSE, generator=rng), indices, starts

    axes = (Axis("batch", 1, 256), Axis("lookups", 1, 1024))
    fixed = ((1, 20), (16, 320), (128, 2560))
    names = ("dense", "indices", "offsets")
    return Model(initialized(Recommender()), names, axes, fixed, inputs)

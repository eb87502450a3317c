# SPDX-License-Identifier: Apache-2.0
"""Graph networks, of torch_geometric and written out here, point clouds, series, and small networks of control."""

import importlib
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from zoo import text
from zoo.model import Axis, Model, Shape, Tensors, generator

from suite.entry import Answers, Both, Entry, Size, at, made, noise
from suite.recommenders import mlp
from suite.text import transformer

NODES = Both(((200, 1000), (333, 1500)), ((2000, 20_000), (20_000, 200_000)))
GRAPH_AXES = (Axis("nodes", 20, 400), Axis("edges", 40, 2000))
WIDTH = Both(32, 128)


class GraphConvolution(nn.Module):
    """Kipf and Welling 2017: neighbours summed, weighed by degrees."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, out)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(target, dtype=x.dtype)
        degree = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device).index_add(0, target, ones)
        scale = (degree + 1).rsqrt()
        y = self.linear(x) * scale.unsqueeze(1)
        summed = torch.zeros_like(y).index_add(0, target, y[source])
        z: torch.Tensor = (summed + y) * scale.unsqueeze(1)
        return z


class IsomorphismConvolution(nn.Module):
    """GIN (Xu et al. 2019)."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.body, self.own = mlp(inside, out, out), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        summed = torch.zeros_like(x).index_add(0, target, x[source])
        y: torch.Tensor = self.body((1 + self.own) * x + summed)
        return y


class AttentionConvolution(nn.Module):
    """GAT (Velickovic et al. 2018), one head: a softmax over the edges into each node."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, out)
        self.arriving, self.leaving = nn.Linear(out, 1), nn.Linear(out, 1)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        each = self.leaving(y)[source] + self.arriving(y)[target]
        score = functional.leaky_relu(each.squeeze(1), 0.2)
        low = torch.full((x.shape[0],), -1e4, dtype=score.dtype, device=x.device)
        highest = low.scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - highest[target])
        # under autocast to 16 bits an exponential is float32
        total = torch.zeros_like(low, dtype=weight.dtype).index_add(0, target, weight)
        weight = weight / total[target].clamp_min(1e-6)
        sent = y[source] * weight.unsqueeze(1)
        z: torch.Tensor = torch.zeros_like(y, dtype=sent.dtype).index_add(0, target, sent)
        return z


class Network(nn.Module):
    """Layers over a graph of ``features`` (nodes, width) and ``edges`` (2, edges)."""

    def __init__(self, layer: Any, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, ...]:
        source, target = edges[0], edges[1]
        for layer in self.layers:
            features = torch.relu(layer(features, source, target))
        return (self.head(features),)


def _graph(width: int) -> Any:
    def inputs(shape: Shape, seed: int) -> Tensors:
        nodes, edges = shape
        rng = generator(seed)
        return torch.randn(nodes, width, generator=rng), torch.randint(
            0, nodes, (2, edges), generator=rng
        )

    return inputs


def _own(name: str, layer: Any, rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        width = at(size, WIDTH)
        module = Network(layer, width, 3)
        return made(module, _graph(width), at(size, NODES), GRAPH_AXES, ("features", "edges"))

    return Entry(name, "misc", build, rank=rank)


def _geometric(name: str, kind: str) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        width = at(size, WIDTH)
        models = importlib.import_module("torch_geometric.nn.models")
        model = getattr(models, kind)(width, width, 3, 8)
        return made(Answers(model), _graph(width), at(size, NODES), GRAPH_AXES, ("x", "edge_index"))

    return Entry(name, "misc", build, ("torch_geometric",))


class PointNet(nn.Module):
    """Qi et al. 2017: layers on every point, the largest of all points, layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, width, 4 * width]
        layers: list[nn.Module] = []
        for inside, out in itertools.pairwise(sizes):
            layers += [nn.Conv1d(inside, out, 1), nn.BatchNorm1d(out), nn.ReLU()]
        self.each, self.head = nn.Sequential(*layers), mlp(4 * width, 2 * width, 40)

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.head(self.each(points.transpose(1, 2)).amax(-1)),)


class RadianceField(nn.Module):
    """NeRF (Mildenhall et al. 2020): places and directions by their sines, eight layers with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = mlp(60, *[width] * 4), mlp(width + 60, *[width] * 3)
        self.density, self.color = nn.Linear(width, 1), mlp(width + 24, width // 2, 3)

    @staticmethod
    def _waves(x: torch.Tensor, count: int) -> torch.Tensor:
        scales = 2.0 ** torch.arange(count, device=x.device, dtype=x.dtype)
        angle = (x.unsqueeze(-1) * scales).flatten(-2)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def forward(self, place: torch.Tensor, direction: torch.Tensor) -> tuple[torch.Tensor, ...]:
        coded = self._waves(place, 10)
        x = self.second(torch.cat([torch.relu(self.first(coded)), coded], -1))
        color = self.color(torch.cat([x, self._waves(direction, 4)], -1))
        return torch.sigmoid(color), functional.softplus(self.density(x))


class ActorCritic(nn.Module):
    """Soft actor-critic's networks: a squashed policy, and two values of what it does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = mlp(32, width, width, 16)
        self.critics = nn.ModuleList(mlp(40, width, width, 1) for _ in range(2))

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, spread = self.actor(state).chunk(2, -1)
        action = torch.tanh(mean)
        values = [critic(torch.cat([state, action], -1)) for critic in self.critics]
        return action, torch.exp(spread.clamp(-5, 2)), torch.minimum(values[0], values[1])


class SeriesMixer(nn.Module):
    """N-BEATS (Oreshkin et al. 2020), generic blocks: each explains a part of what is left."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(96, width, width, width, 96 + 24) for _ in range(blocks))

    def forward(self, series: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forecast = torch.zeros_like(series[:, :24])
        for block in self.blocks:
            back, ahead = block(series).split([96, 24], -1)
            series, forecast = series - back, forecast + ahead
        return (forecast,)


def _batched(
    name: str, make: Any, rest: tuple[int, ...], axis: Axis, shapes: Any, *fields: Any
) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(*(at(size, one) for one in fields))
        return made(module, noise(*rest), at(size, shapes), (axis,), sample=True)

    return Entry(name, "misc", build)


def _nerf(size: Size) -> Model:
    torch.manual_seed(0)

    def inputs(shape: Shape, seed: int) -> Tensors:
        rng = generator(seed)
        return torch.randn(*shape, 3, generator=rng), torch.randn(*shape, 3, generator=rng)

    module = RadianceField(at(size, Both(128, 256)))
    shapes = at(size, Both(((256,), (700,)), ((4096,), (65536,))))
    return made(module, inputs, shapes, (Axis("rays", 16, 1024),), ("place", "direction"))


def _patches(size: Size) -> Model:
    fields = {
        "context_length": 128,
        "patch_length": 16,
        "patch_stride": 8,
        "num_input_channels": 7,
        "d_model": Both(64, 256),
        "num_attention_heads": 4,
        "num_hidden_layers": Both(2, 4),
        "ffn_dim": Both(128, 512),
        "prediction_length": 24,
    }
    model = transformer("PatchTST", "ForPrediction", size, fields)
    module = Answers(model, ("past_values",), ("prediction_outputs",))
    shapes = at(size, Both(((1,), (6,)), ((8,), (128,))))
    return made(module, noise(128, 7), shapes, names=("past_values",), sample=True)


def _tagger(size: Size) -> Model:
    return text.lstm_tagger()


MANY = Axis("batch", 1, 256)

ENTRIES: tuple[Entry, ...] = (
    _own("gcn", GraphConvolution, rank=0),
    _own("gin", IsomorphismConvolution),
    _own("gat", AttentionConvolution),
    _geometric("geometric_gcn", "GCN"),
    _geometric("geometric_sage", "GraphSAGE"),
    _geometric("geometric_gat", "GAT"),
    _batched(
        "point_net",
        PointNet,
        (256, 3),
        Axis("batch", 1, 8),
        Both(((1,), (3,)), ((4,), (64,))),
        Both(32, 64),
    ),
    Entry("nerf", "misc", _nerf, rank=0),
    _batched(
        "actor_critic",
        ActorCritic,
        (32,),
        MANY,
        Both(((1,), (64,)), ((1,), (1024,))),
        Both(128, 256),
    ),
    _batched(
        "n_beats",
        SeriesMixer,
        (96,),
        MANY,
        Both(((4,), (50,)), ((32,), (1024,))),
        Both(128, 512),
        Both(3, 8),
    ),
    Entry("patch_tst", "misc", _patches, ("transformers",)),
    Entry("lstm_tagger", "misc", _tagger),
)

# SPDX-License-Identifier: Apache-2.0
"""Equalized convolutions compute the same, with even ranges; corrected biases take out the mean error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from blade.backends.quant.analysis.affine import affine_of, quantize_weight
from blade.backends.quant.analysis.layers import find_layers
from blade.backends.quant.analysis.simulate import Scheme, Simulation
from blade.backends.quant.transforms.equalize import (
    correct_bias,
    equalize,
    find_pairs,
    input_ranges,
    multiply_inputs,
)
from blade.core.cluster import Cluster

Make = Callable[..., Cluster]


class Separable(nn.Module):
    """As in a MobileNet: pointwise, depthwise, pointwise, with channels of very different ranges."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=groups, padding=1)
        self.c = nn.Conv2d(8, 6, 1, bias=False)
        uneven = torch.logspace(-2, 2, 8).view(8, 1, 1, 1)
        self.a.weight, self.b.weight = (
            nn.Parameter(self.a.weight * uneven),
            nn.Parameter(self.b.weight / uneven),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Branch(nn.Module):
    """What the first makes is read twice, and a sigmoid does not keep scales: no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.c(torch.sigmoid(self.b(y))) + y


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_function_stays_and_the_ranges_become_even(cluster_of: Make, groups: int) -> None:
    cluster = cluster_of(Separable(groups), [torch.randn(2, 4, 6, 6)])
    gm, pairs = equalize(cluster.gm, find_layers(cluster.gm))
    assert pairs == 2
    x = torch.randn(3, 4, 5, 7, dtype=torch.float64)
    [got], [want] = gm.double()(x), cluster.gm.double()(x)
    assert (got - want).norm() < 1e-6 * want.norm()  # what float32 rounds in the weights
    a, b, _ = find_layers(gm.float())
    outputs, inputs = a.weight.abs().flatten(1).amax(1), input_ranges(b.weight, groups)
    torch.testing.assert_close(outputs, inputs, rtol=1e-2, atol=0)


def test_only_what_keeps_scales_is_a_pair(cluster_of: Make) -> None:
    cluster = cluster_of(Branch(), [torch.randn(2, 4, 6, 6)])
    layers = find_layers(cluster.gm)
    assert find_pairs(layers) == []
    assert equalize(cluster.gm, layers) == (cluster.gm, 0)


@pytest.mark.parametrize(
    ("groups", "shape"), [(1, (6, 4, 3, 3)), (2, (6, 2, 1, 1)), (4, (8, 1, 5))]
)
def test_channels_read_are_those_of_the_groups(groups: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    channels = groups * shape[1]
    scales = torch.rand(channels) + 0.5
    got, ranges = multiply_inputs(weight, scales, groups), input_ranges(weight, groups)
    per_group = shape[0] // groups
    for channel in range(channels):
        group, inside = divmod(channel, shape[1])
        rows = slice(group * per_group, (group + 1) * per_group)
        assert torch.equal(got[rows, inside], weight[rows, inside] * scales[channel])
        assert ranges[channel] == weight[rows, inside].abs().max()


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_a_corrected_bias_takes_out_the_mean(cluster_of: Make, kind: str) -> None:
    conv = kind == "conv"
    model = nn.Sequential(nn.Conv2d(3, 5, 3) if conv else nn.Linear(6, 5), nn.ReLU())
    shape = (2, 3, 6, 6) if conv else (4, 6)
    samples = [torch.rand(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    cluster = cluster_of(model, samples)
    every = [*cluster.samples, *cluster.calibration]
    [layer] = find_layers(cluster.gm)
    scheme = Scheme("static", quantize_weight(layer.weight, bits=4), affine_of(0, 0.7, False))
    simulation = Simulation(cluster.gm, [layer], every)
    corrected = correct_bias(simulation, {layer.name: layer}, {layer.name: scheme})[layer.name]

    own = model[0].bias.detach()
    x = torch.cat(samples)
    dims = (0, 2, 3) if conv else (0,)
    want = layer.run(x, layer.weight, own)
    off = want - layer.run(scheme.seen(x), scheme.weight.dequantize(), own)
    assert corrected.bias is not None
    torch.testing.assert_close(corrected.bias, own + off.mean(dims), atol=1e-6, rtol=1e-5)
    again = layer.run(scheme.seen(x), scheme.weight.dequantize(), corrected.bias)
    assert (want - again).mean(dims).abs().max() < 1e-5
    assert off.mean(dims).abs().max() > 1e-3

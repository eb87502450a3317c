# SPDX-License-Identifier: Apache-2.0
"""Python numbers made of tensors and computed with, used as indexes, bounds and sizes."""

import math
import operator
import statistics

import numpy as np
import torch
from decision_table import Draw, decides
from on_values import Layer, masked, rows
from torch import nn
from torch.nn import functional


@decides(
    "x * (0.1 / max(float(rms), 1e-5))",
    lambda d: (d.normal(3, 8, scale=d.pick(1e-7, 0.2, 1.0, 8.0)),),
    sample=lambda d: (d.normal(3, 8),),
)
class RootMeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * (0.1 / max(float(x.pow(2).mean().sqrt()), 1e-5)) * 3)  # decides


@decides(
    "conv(x / x.abs().max().item())",
    lambda d: (d.normal(d.size(1, 3), 2, 6, d.size(4, 9), scale=d.number(0.1, 8)),),
)
class NormalizedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x / x.abs().max().item()))  # decides


@decides("float arithmetic, math.exp and math.sqrt", rows)
class MathOfFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = float(x.mean()), float(x.var(unbiased=False))
        gain = math.exp(-abs(mean)) / math.sqrt(var + 1e-3) + mean**2  # decides
        return torch.tanh(x) * gain - mean


@decides("a sum of floats in a loop", rows)
class RunningTotal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for layer in self.layers:
            x = layer(x)
            total += float(x.mean())  # decides
        return x * total + total


@decides("round(float)", rows)
class Rounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = round(float(x.abs().mean()) * 4 + 0.3)  # decides
        return torch.tanh(x) * steps


@decides("float(f'{v:.1f}')", rows)
class ThroughText(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coarse = float(f"{float(x.std()):.1f}")  # decides
        return torch.tanh(x) * coarse + 1


@decides("alpha=, negative_slope=, min= and max= of floats", rows)
class NumberArguments(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.min().item(), float(x.max())
        y = torch.add(x, torch.sin(x), alpha=high)  # decides
        y = functional.leaky_relu(y, abs(low) * 0.1)  # decides
        return torch.clamp(y, min=low / 2, max=max(high, low / 2 + 1))  # decides


@decides("torch.full of a float", rows)
class FullOfMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.full((x.shape[0], 2), float(x.mean()))  # decides
        return torch.cat([torch.tanh(x), padding], 1) * 2


def positioned(draw: Draw) -> tuple[torch.Tensor, ...]:
    n = draw.size(3, 8)
    return draw.normal(n, 8), draw.ints(0, n - 1, 1)


@decides("x[int(t)]", positioned)
class IntAsIndex(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[int(at)]) * 2  # decides


@decides("x[: int(t) + 1], a bound of a slice", positioned)
class IntAsBound(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[: int(at) + 1]).sum(0) * 2  # decides


@decides("torch.zeros(int(t), 8), a size", positioned)
class IntAsSize(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(x), torch.zeros(int(at), 8)]) + 1  # decides


@decides("range(int(t))", positioned)
class IntAsRange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for _ in range(int(at)):  # decides
            x = self.layer(x) + x
        return x * 0.5


@decides("a tensor as an index of a Python list", lambda d: (d.normal(2, 8), d.ints(0, 2)))
class ListIndex(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return [torch.relu, torch.tanh, torch.sigmoid][at](x) + 1  # decides


@decides("operator.index and range(t)", lambda d: (d.normal(2, 8), d.ints(1, 4)))
class OperatorIndex(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        for step in range(operator.index(count)):  # decides
            x = torch.sin(x) + step
        return x * 2


@decides("(x > 0).sum().item() as k of topk", rows)
class CountAsK(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        return torch.topk(x.flatten(), count).values.sigmoid()  # decides


@decides("arange(int(lengths.max()))", lambda d: (d.normal(3, 9, 8), d.ints(1, 9, 3)))
class LengthsToMask(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest)[None] < lengths[:, None]  # decides
        return torch.tanh(x[:, :longest]).masked_fill(~mask[..., None], 0.0)  # decides


def split_sizes(draw: Draw) -> tuple[torch.Tensor, ...]:
    sizes = draw.ints(1, 4, 3)
    return draw.normal(int(sizes.sum()), 8), sizes


@decides("x.split(sizes.tolist())", split_sizes)
class SplitByList(nn.Module):
    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        parts = torch.tanh(x).split(sizes.tolist())  # decides
        return torch.stack([part.amax(0) for part in parts])


@decides("max, min and index of a list of ints", split_sizes)
class MaxOfLengths(nn.Module):
    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        lengths = sizes.tolist()
        longest = max(lengths)  # decides
        where = lengths.index(longest)  # decides
        return torch.tanh(x[:longest]).sum(0) * (where + 1) + min(lengths)  # decides


@decides("statistics.median of tolist()", rows)
class MedianOfList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x - statistics.median(x[0].tolist())) * 2  # decides


@decides("np.percentile, and back", rows)
class NumpyRoundTrip(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = np.percentile(x.detach().cpu().numpy(), 90)  # decides
        ranks = torch.from_numpy(np.argsort(x.numpy(), axis=-1).astype(np.int64))  # decides
        return torch.clamp(x, max=float(high)) + ranks * 0.1


@decides(
    "the periods of an FFT, as in TimesNet",
    lambda d: (
        torch.sin(torch.arange(24.0)[None, :, None] * d.pick(0.3, 0.6, 0.8, 1.3))
        + d.normal(2, 24, 3, scale=0.2),
    ),
)
class FftPeriods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        strength = torch.fft.rfft(x, dim=1).abs().mean((0, 2))
        strength[0] = 0
        tops = torch.topk(strength, 2).indices.numpy()  # decides
        found = []
        for period in t // tops:  # decides
            length = math.ceil(t / period) * period  # decides
            y = functional.pad(x, (0, 0, 0, length - t))  # decides
            y = y.reshape(b, length // period, period, c).permute(0, 3, 1, 2)  # decides
            found.append(torch.relu(self.conv(y)).permute(0, 2, 3, 1).reshape(b, -1, c)[:, :t])
        return torch.stack(found, -1).mean(-1) + x


@decides(
    "a share of masked rows, int(share * n)",
    lambda d: (d.normal(d.size(2, 9), 8), torch.tensor(d.number(0.1, 0.9))),
)
class ShareOfRows(nn.Module):
    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        kept = int(share.item() * x.shape[0])  # decides
        y = torch.relu(x)
        return torch.cat([y[:kept], -x[kept:]])


@decides("pow(x, int(t))", lambda d: (d.normal(2, 8), d.ints(0, 4)))
class IntAsPower(nn.Module):
    def forward(self, x: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) ** int(power) + 1  # decides


@decides("float(a) // float(b) and a remainder", rows)
class FloorOfFloats(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, rest = divmod(float(x.abs().sum()), 3.7)  # decides
        return torch.tanh(x) * (math.floor(whole) + 1) + rest


@decides("bool(t) as a number", masked)
class BoolAsNumber(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (1 + bool(mask.all()))  # decides


@decides("Dice in DIN, with a value decided after it", rows)
class Dice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.alpha = nn.Parameter(torch.rand(8))
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.randn(8))  # type: ignore[union-attr]
            self.norm.running_var.copy_(torch.rand(8) + 0.5)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        p = torch.sigmoid(self.norm(y))
        z = p * y + (1 - p) * self.alpha * y
        return z if z.sum() > 0 else z - 1  # decides


@decides("a tensor as a bound, x[:t] and x[t:]", positioned, is_fixed=True)
class TensorAsBound(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return torch.cat([y[at:], -y[:at]]) * 2  # decides


@decides("shifts and amounts of padding", positioned)
class RollsAndPads(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = torch.roll(torch.tanh(x), int(at), 0)  # decides
        return functional.pad(y, (0, int(at))) + 1  # decides


@decides("repeat, expand and chunk by ints of tensors", lambda d: (d.normal(1, 8), d.ints(1, 4)))
class RepeatsByValue(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        n = int(count)
        y = torch.tanh(x).repeat(n, 1) + x.expand(n, -1)  # decides
        return torch.cat([c.sum(1) for c in torch.chunk(y, n, 1)]) * 2  # decides


@decides("an own buffer written in a loop, by position", positioned)
class FillsOwnBuffer(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], 8)
        for k in range(int(at) + 1):  # decides
            out[k] = torch.tanh(x[k]) * (k + 1)
        return out + 1


@decides("int(t) + 1, negative and doubled, of one number", positioned)
class IntArithmetic(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        last = -int(at) - 1
        return torch.tanh(x[last]) * (2 * int(at) + 1) + torch.ones(abs(last), 8).sum(0)  # decides

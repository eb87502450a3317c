# SPDX-License-Identifier: Apache-2.0
"""Branches on sizes, ranks, strides and dtypes, and sizes computed in Python."""

import math

import numpy as np
import torch
from decision_table import Draw, decides
from torch import nn
from torch.nn import functional


def images(draw: Draw) -> tuple[torch.Tensor, ...]:
    return (draw.normal(draw.size(1, 3), 3, draw.size(3, 17), draw.size(3, 17)),)


def sequences(draw: Draw) -> tuple[torch.Tensor, ...]:
    return (draw.normal(draw.size(1, 4), draw.size(1, 20), 8),)


@decides(
    "padding to a multiple of 7 where needed",
    lambda d: (d.normal(d.size(1, 2), 3, d.pick(7, 8, 13, 14), d.pick(7, 9, 14, 20)),),
    sample=lambda d: (d.normal(1, 3, 14, 14),),
)
class PadsToMultiple(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[-2:]
        bottom, right = (7 - h % 7) % 7, (7 - w % 7) % 7
        if bottom or right:  # decides
            x = functional.pad(x, (0, right, 0, bottom))
        b, c, h, w = x.shape
        return torch.relu(x.view(b, c, h // 7, 7, w // 7, 7)).mean((3, 5)) * 2


@decides("shape[0] == 1", sequences, sample=lambda d: (d.normal(1, 5, 8),))
class BatchOfOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:  # decides
            return torch.tanh(x[0])
        return torch.tanh(x).mean(0) + 1


@decides("numel() > 100", sequences)
class LargeOrSmall(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 100:  # decides
            return torch.relu(x) - 1
        return torch.relu(x) * 2 + 1


@decides("chunks of size(0) // 7", lambda d: (d.normal(d.size(7, 40), 4),))
class SeventhParts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x.size(0) // 7
        parts = x[: part * 7].split(part)  # decides
        return torch.cat([one.mean(0, keepdim=True) for one in parts]) * 2


@decides("math.ceil(h / 7) as a size", images)
class CeilOfSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = math.ceil(x.shape[2] / 7), math.ceil(x.shape[3] / 7)  # decides
        return functional.adaptive_avg_pool2d(torch.relu(x), (h, w)) + 1  # decides


class _Square(nn.Module):
    """Patches in a row, as a square again: what is asked of its sides relies on the root of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def side(self, count: int) -> int:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 3:  # decides
            raise ValueError("three channels")
        y = self.patches(x).flatten(2)
        side = self.side(y.shape[2])  # decides
        y = functional.avg_pool2d(y.reshape(x.shape[0], 8, side, side), 2)  # decides
        if y.shape[2] > 2:  # decides
            y = y * 2
        return torch.relu(y).mean(3) + 1


def squares(draw: Draw) -> tuple[torch.Tensor, ...]:
    side = 4 * draw.size(2, 7)
    return (draw.normal(draw.size(1, 3), 3, side, side),)


@decides("int(n**0.5) as a size", squares)
class RootOfSize(_Square):
    def side(self, count: int) -> int:
        return int(count**0.5)  # decides


@decides("math.ceil(n**0.5) as a size", squares)
class CeilOfRoot(_Square):
    def side(self, count: int) -> int:
        return math.ceil(count**0.5)  # decides


@decides(
    "is_contiguous()",
    lambda d: (d.pick(d.normal(4, 8), d.normal(8, 4).t(), d.normal(4, 16)[:, ::2]),),
    sample=lambda d: (d.normal(4, 8),),
)
class Contiguous(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():  # decides
            return torch.relu(x.view(-1)) * 2
        return torch.relu(x.t()).reshape(-1) - 1


@decides(
    "stride()",
    lambda d: (d.pick(d.normal(5, 8), d.normal(8, 5).t()),),
    sample=lambda d: (d.normal(5, 8),),
)
class Strides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(0) == 1:  # decides
            return torch.tanh(x) * 2
        return torch.tanh(x) + x.stride(-1)


@decides(
    "the dimensions behind an Ellipsis",
    lambda d: (d.normal(*d.pick((6, 8), (2, 6, 8), (8,), (2, 3, 4, 8))),),
    sample=lambda d: (d.normal(6, 8),),
)
class LastOfEach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y[..., 0] = 0  # decides
        return y[..., :2] * y[..., 3, None]


@decides(
    "a sample without dimensions",
    lambda d: (d.normal(4, 8), d.pick(d.normal(4), d.normal(4)[0])),
    sample=lambda d: (d.normal(4, 8), d.normal(4)[0]),
)
class OneTimeOrSeveral(nn.Module):
    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        if time.ndim == 0:  # decides
            time = time[None]
        return torch.relu(x) * time[:, None] + 1


@decides("ndim", lambda d: (d.normal(*d.pick((6, 8), (2, 6, 8), (8,))),))
class Ranks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 2:  # decides
            x = x[None]
        elif x.dim() == 1:  # decides
            x = x[None, None]
        return torch.relu(self.linear(x)).mean(1)


@decides(
    "two shapes compared",
    lambda d: (d.normal(2, n := d.size(2, 6), 8), d.normal(2, d.pick(n, 4), 8)),
)
class SameShape(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape == y.shape:  # decides
            return torch.tanh(x) + y
        return torch.tanh(x) + y.mean(1, keepdim=True)


@decides(
    "a resize where sizes differ",
    lambda d: (d.normal(1, 2, h := d.size(4, 8), h), d.normal(1, 2, d.pick(h, 6), h)),
    sample=lambda d: (d.normal(1, 2, 6, 6), d.normal(1, 2, 6, 6)),
)
class ResizesToFit(nn.Module):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        if x.shape[-2:] != skip.shape[-2:]:  # decides
            x = functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
        return torch.relu(x + skip) * 2


@decides("crop of an odd size", images)
class OddSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2 == 1:  # decides
            x = x[..., :-1]
        return x.unflatten(-1, (-1, 2)).amax(-1) * 2


@decides("window = min(side, 8), as in Swin", images)
class SmallerWindow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = min(x.shape[2], x.shape[3], 8)  # decides
        return torch.tanh(x[:, :, :window, -window:]).sum(1)


@decides("side = int(n ** 0.5), as in ViT", lambda d: (d.normal(2, d.size(2, 6) ** 2, 4),))
class SquareRoot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = int(x.shape[1] ** 0.5)  # decides
        y = x.transpose(1, 2).reshape(x.shape[0], 4, side, side)
        return functional.avg_pool2d(torch.relu(y), 2)


@decides("math.sqrt(x.shape[-1]) as a scale", lambda d: (d.normal(2, 5, d.size(2, 20)),))
class ScaleBySize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2) / math.sqrt(x.shape[-1])  # decides
        return torch.softmax(scores, -1) @ x * 2


@decides("int(n * 0.3), round(n * 0.5), divmod(n, 3)", lambda d: (d.normal(d.size(4, 30), 8),))
class SharesOfSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        kept, middle = int(n * 0.3), round(n * 0.5)  # decides
        thirds, rest = divmod(n, 3)  # decides
        return torch.tanh(x[:kept]).sum(0) + x[middle] * thirds - rest


@decides(
    "k = max(1, n // 2) of topk",
    lambda d: (d.normal(2, d.pick(1, d.size(2, 20)), 8),),
    sample=lambda d: (d.normal(2, 6, 8),),
)
class TopHalf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = torch.topk(x.mean(-1), max(1, x.shape[1] // 2), dim=1).indices  # decides
        return torch.gather(x, 1, best.sort(1).values[..., None].expand(-1, -1, 8)) * 2


@decides("torch.tensor([w, h]) of sizes", images)
class TensorOfSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[-2:]
        scale = torch.tensor([w, h], dtype=x.dtype)  # decides
        return torch.sigmoid(x.mean((1, 2, 3)))[:, None] * scale


@decides(
    "a channel count in (1, 3)",
    lambda d: (d.normal(2, d.pick(1, 3, 4), 5, 5),),
    sample=lambda d: (d.normal(2, 3, 5, 5),),
)
class GrayOrColor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in (1, 3):  # decides
            x = x[:, :3]
        elif x.shape[1] == 1:  # decides
            x = x.expand(-1, 3, -1, -1)
        return torch.relu(self.conv(x))


@decides("a name made of sizes", lambda d: (d.normal(2, d.pick(4, 6, 8), 3),))
class NamedBySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({f"length{n}": torch.randn(n, 1) for n in (4, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = f"length{x.shape[1]}"  # decides
        if name in self.scales:
            return torch.tanh(x) * self.scales[name]
        return torch.tanh(x) * 0.5


@decides(
    "nothing at all, numel() == 0",
    lambda d: (d.normal(d.pick(0, 1, 3, 5), 8),),
    sample=lambda d: (d.normal(3, 8),),
)
class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:  # decides
            return x.new_ones(1, 8)
        return (torch.tanh(x) / x.abs().max()).sum(0, keepdim=True)


@decides(
    "a table that is too short raises",
    lambda d: (d.normal(2, d.size(4, 12), 8),),
    sample=lambda d: (d.normal(2, 6, 8),),
)
class LimitedLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 10:  # decides
            raise ValueError(f"length {x.shape[1]} > 10")
        return torch.relu(x + self.position[: x.shape[1]]) * 2


@decides(
    "the table is interpolated where it is too short",
    sequences,
    sample=lambda d: (d.normal(2, 6, 8),),
)
class StretchedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, length = self.position, x.shape[1]
        if length > table.shape[-1]:  # decides
            table = functional.interpolate(table, size=length, mode="linear", align_corners=False)
        return torch.relu(x + table[..., :length].transpose(1, 2))


@decides(
    "is_floating_point()",
    lambda d: (d.pick(d.normal(3, 8), d.ints(0, 255, 3, 8), d.ints(0, 255, 3, 8).to(torch.uint8)),),
    sample=lambda d: (d.ints(0, 255, 3, 8),),
)
class FloatOrBytes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_floating_point(x):  # decides
            x = x.float() / 255
        return torch.tanh(x) - 0.5


@decides(
    "dtype == int64: ids are embedded",
    lambda d: (d.pick(d.normal(3, 5, 8), d.ints(0, 9, 3, 5)),),
    sample=lambda d: (d.ints(0, 9, 3, 5),),
)
class IdsOrVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.int64:  # decides
            x = self.table(x)
        return torch.relu(x).mean(1) * 2


@decides("device and training, which do not change", sequences, is_fixed=True)
class DeviceAndTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda" or x.is_cuda:  # decides
            x = x.half()
        if self.training:  # decides
            x = functional.dropout(x, 0.5)
        return torch.relu(x) + 1


@decides("two sizes of one input compared", images)
class WiderThanTall(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > x.shape[-2]:  # decides
            x = x.transpose(-1, -2)
        return torch.relu(x).sum(-1) * 2


@decides("a product of sizes, h * w > 64", images)
class Area(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] * x.shape[-2] > 64:  # decides
            x = functional.avg_pool2d(x, 2)
        return torch.tanh(x) * 2


@decides("a power of two, n & (n - 1)", lambda d: (d.normal(d.pick(1, 2, 3, 4, 6, 8, 12, 16), 8),))
class PowerOfTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = int(x.shape[0])
        if n & (n - 1):  # decides
            x = functional.pad(x, (0, 0, 0, 2 ** n.bit_length() - n))  # decides
        return torch.cumsum(torch.tanh(x), 0)


@decides("whether a quotient is whole", lambda d: (d.normal(d.pick(4, 6, 8, 9, 12), 8),))
class WholeWindows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.shape[0] / 4
        if not windows.is_integer():  # decides
            x = functional.pad(x, (0, 0, 0, math.ceil(windows) * 4 - x.shape[0]))
        return torch.tanh(x.reshape(-1, 4, 8)).sum(1)


@decides("NumPy's logarithm of a size", lambda d: (d.normal(2, d.size(3, 12), 8),))
class SampledKeys(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        count = 2 * np.ceil(np.log(length)).astype("int").item()
        count = count if count < length else length  # decides
        return torch.tanh(x).topk(count, 1)[0].sum(1)


@decides("math.gcd and max of two sizes", images)
class SquareTiles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = int(x.shape[-2]), int(x.shape[-1])
        side, tile = max(h, w), math.gcd(h, w)  # decides
        x = functional.pad(x, (0, side - w, 0, side - h))
        return torch.relu(functional.avg_pool2d(x, tile))


@decides(
    "an index of a Python list by a size, and except",
    lambda d: (d.normal(d.size(1, 6), 8),),
    sample=lambda d: (d.normal(2, 8),),
)
class ExceptOnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            act = [torch.relu, torch.tanh, torch.sigmoid][x.shape[0] - 1]  # decides
        except IndexError:
            act = torch.sin
        return act(x) * 2


@decides("while the size is above 2", lambda d: (d.normal(1, 2, d.size(2, 20)),))
class Pyramid(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.sum(-1)
        while x.shape[-1] > 2:  # decides
            x = torch.tanh(functional.avg_pool1d(x, 2, ceil_mode=True))
            sums = sums + x.sum(-1)
        return sums


@decides("the size of x[mask]", lambda d: (d.normal(6, 8), d.bits(6, share=d.pick(0.0, 0.4, 0.9))))
class SizeOfSelected(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = x[mask]
        if kept.shape[0] == 0:  # decides
            return torch.zeros(8)
        if kept.shape[0] % 2:  # decides
            kept = kept[:-1]
        return torch.tanh(kept).sum(0) + 1

# SPDX-License-Identifier: Apache-2.0
"""Small models of every kind that is served, with inputs at any batch and length.

model = MODELS["conv"]
module, exact = built(model, torch.float16)              # on the device; in float64 on the CPU
given = placed(model.inputs((2, 9), generator), torch.float16)
relative(module(*given), exact(*doubled(given)))         # |got - want| / |want|
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda"
Shape = tuple[int, int]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class SmallModel:
    """``inputs`` at (batch, length or size); floating-point ones in float32."""

    module: Callable[[], nn.Module]
    inputs: Callable[[Shape, torch.Generator], Tensors]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.down(functional.gelu(self.up(self.norm(x)))), -1)


class Conv(nn.Module):
    """Convolutions, strides, a depthwise one, batch norms, poolings, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 32, 1, stride=2)
        self.group = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.silu(self.depth(x)) + x
        x = functional.max_pool2d(functional.silu(self.group(self.point(x))), 2, 1, 1)
        y: torch.Tensor = self.head(x.mean((2, 3)))
        return y


class Residual(nn.Module):
    """What our kernels compute with what follows it: 3x3, strided and 1x1, batch norms, a sum; and patches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.first = nn.Conv2d(width, 32, 1, bias=False)
        self.second = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.third = nn.Conv2d(32, width, 1, bias=False)
        self.down = nn.Conv2d(width, 96, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (32, 32, width, 96))
        for norm in self.norms:
            nn.init.normal_(norm.running_mean, 0.5)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.patches(x))
        y = functional.relu(self.norms[0](self.first(x)))
        y = functional.relu(self.norms[1](self.second(y)))
        x = functional.relu(self.norms[2](self.third(y)) + x)
        x = functional.relu(self.norms[3](self.down(x)))
        return x.mean((2, 3))


class Transformer(nn.Module):
    """One layer with a padding mask: attention, residuals, norms, an MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(100, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = (self._heads(f(x)) for f in (self.query, self.key, self.value))
        seen = mask[:, None, None, :] > 0
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norms[0](x + self.out(attended.transpose(1, 2).flatten(2)))
        y: torch.Tensor = self.norms[1](x + self.down(functional.gelu(self.up(x))))
        return y


class Rotary(nn.Module):
    """What decoders of today are made of: RMS norm, rotary positions, causal attention, a gated MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.rand(width) + 0.5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gate, self.up = nn.Linear(width, 96, bias=False), nn.Linear(width, 96, bias=False)
        self.down = nn.Linear(96, width, bias=False)
        half = width // heads // 2
        self.register_buffer("speeds", 100.0 ** (-torch.arange(half) / half))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        ) * self.scale

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.size(-2), device=x.device)
        angles = places[:, None] * self.speeds.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self._norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self._turned(parts[0]), self._turned(parts[1]), parts[2]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        y = self._norm(x)
        made: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return made


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.lstm(self.embed(ids))[0])) * 2


def _features(shape: Shape, rng: torch.Generator) -> Tensors:
    return (torch.randn(*shape, 48, generator=rng),)


def _images(shape: Shape, rng: torch.Generator) -> Tensors:
    batch, size = shape
    return (torch.randn(batch, 3, size + 4, size + 5, generator=rng),)


def _masked_words(shape: Shape, rng: torch.Generator) -> Tensors:
    mask = torch.ones(shape, dtype=torch.int64)
    mask[::2, shape[1] - shape[1] // 3 :] = 0
    return torch.randint(0, 100, shape, generator=rng), mask


def _words(shape: Shape, rng: torch.Generator) -> Tensors:
    return (torch.randint(0, 50, shape, generator=rng),)


def _states(shape: Shape, rng: torch.Generator) -> Tensors:
    return (torch.randn(*shape, 64, generator=rng),)


MODELS: dict[str, SmallModel] = {
    "mlp": SmallModel(Mlp, _features),
    "conv": SmallModel(Conv, _images),
    "residual": SmallModel(Residual, _images),
    "transformer": SmallModel(Transformer, _masked_words),
    "rotary": SmallModel(Rotary, _states),
    "tagger": SmallModel(Tagger, _words),
}


def built(model: SmallModel, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = model.module().eval().to(DEVICE, dtype)
    return module, copy.deepcopy(module).cpu().double()


def placed(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tuple(t.to(DEVICE, dtype if t.is_floating_point() else t.dtype) for t in tensors)


def doubled(tensors: Tensors) -> Tensors:
    return tuple(t.cpu().double() if t.is_floating_point() else t.cpu() for t in tensors)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of all numbers together; NaN never passes a comparison."""
    return float((got.double().cpu() - want).norm() / want.norm())

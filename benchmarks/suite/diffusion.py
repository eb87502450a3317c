# SPDX-License-Identifier: Apache-2.0
"""Diffusion: networks of diffusers, and a U-Net and a transformer written out here for machines without it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from zoo.model import Model, Shape, Tensors, generator

from suite.entry import Answers, Both, Entry, Size, at, made, noise
from suite.libraries import imported

SHAPES = Both(((1,), (3,)), ((1,), (32,)))


def _waves(step: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of time steps (batch,), as (batch, width)."""
    each = torch.arange(width // 2, device=step.device, dtype=torch.float32)
    angle = step.float().unsqueeze(1) * torch.exp(each * (-math.log(1e4) / (width // 2)))
    return torch.cat([angle.sin(), angle.cos()], -1)


class TimedBlock(nn.Module):
    def __init__(self, inside: int, out: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inside), nn.GroupNorm(8, out)])
        self.first, self.second = nn.Conv2d(inside, out, 3, 1, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.time, self.across = nn.Linear(time, out), nn.Conv2d(inside, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        z: torch.Tensor = self.across(x) + self.second(functional.silu(self.norms[1](y)))
        return z


class PixelAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, wide = x.shape
        parts = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, -1)
        q, k, v = parts.transpose(-1, -2).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        z: torch.Tensor = x + self.out(y.reshape(batch, width, height, wide))
        return z


class DdpmUnet(nn.Module):
    """Ho et al. 2020: residual blocks told the time step, attention in the middle, two levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.head, self.tail = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        self.first, self.second = TimedBlock(width, width, time), TimedBlock(width, 2 * width, time)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.middle, self.attention = (
            TimedBlock(2 * width, 2 * width, time),
            PixelAttention(2 * width, 4),
        )
        self.up = nn.Conv2d(2 * width, width, 3, 1, 1)
        self.last = TimedBlock(2 * width, width, time)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time = self.time(_waves(step, self.width).to(x.dtype))
        kept = self.first(self.head(x), time)
        x = self.attention(self.second(self.down(kept), time))
        x = functional.interpolate(self.middle(x, time), scale_factor=2.0, mode="nearest")
        return (self.tail(self.last(torch.cat([self.up(x), kept], 1), time)),)


class DiffusionLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.modulate(functional.silu(time)).unsqueeze(1).chunk(6, -1)
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x) * (1 + a) + b)
        parts = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + c * self.out(y.transpose(1, 2).reshape(batch, length, width))
        z: torch.Tensor = x + f * self.feed(self.norms[1](x) * (1 + d) + e)
        return z


class DiffusionTransformer(nn.Module):
    """DiT (Peebles and Xie 2023) on latents of 4 channels, patches of 2 x 2."""

    def __init__(self, width: int, layers: int, heads: int, side: int) -> None:
        super().__init__()
        self.width, self.side = width, side
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(DiffusionLayer(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time = self.time(_waves(step, 256).to(x.dtype))
        y = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            y = layer(y, time)
        half = self.side // 2
        y = self.out(self.norm(y)).view(-1, half, half, 2, 2, 4)
        return (y.permute(0, 5, 1, 3, 2, 4).reshape(-1, 4, self.side, self.side),)


def _denoised(side: int, channels: int) -> Callable[[Shape, int], Tensors]:
    def inputs(shape: Shape, seed: int) -> Tensors:
        rng = generator(seed)
        latents = torch.randn(*shape, channels, side, side, generator=rng)
        return latents, torch.randint(0, 1000, shape, generator=rng)

    return inputs


def _ddpm(size: Size) -> Model:
    torch.manual_seed(0)
    side = at(size, Both(24, 64))
    return made(DdpmUnet(at(size, Both(32, 128))), _denoised(side, 3), at(size, SHAPES))


def _dit(size: Size) -> Model:
    torch.manual_seed(0)
    side = at(size, Both(16, 32))
    fields = [at(size, one) for one in (Both(192, 768), Both(2, 12), Both(3, 12))]
    return made(DiffusionTransformer(*fields, side), _denoised(side, 4), at(size, SHAPES))


def _diffusers(size: Size, name: str, fields: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(imported("diffusers"), name)(**at(size, fields))
    return model


def _unet(size: Size) -> Model:
    fields = {
        "sample_size": Both(16, 64),
        "block_out_channels": Both((32, 64), (320, 640, 1280, 1280)),
        "down_block_types": Both(
            ("CrossAttnDownBlock2D", "DownBlock2D"),
            ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        ),
        "up_block_types": Both(
            ("UpBlock2D", "CrossAttnUpBlock2D"), ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
        ),
        "layers_per_block": Both(1, 2),
        "cross_attention_dim": Both(64, 768),
        "norm_num_groups": Both(8, 32),
    }
    model = _diffusers(size, "UNet2DConditionModel", fields)
    side, width = at(size, Both(16, 64)), at(size, Both(64, 768))
    draw = _denoised(side, 4)

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (*draw(shape, seed), torch.randn(*shape, 77, width, generator=generator(seed + 9)))

    module = Answers(model, fixed={"return_dict": False})
    return made(module, inputs, at(size, Both(((1,), (3,)), ((2,), (8,)))))


def _vae(size: Size) -> Model:
    fields = {
        "down_block_types": Both(("DownEncoderBlock2D",) * 2, ("DownEncoderBlock2D",) * 4),
        "up_block_types": Both(("UpDecoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 4),
        "block_out_channels": Both((32, 64), (128, 256, 512, 512)),
        "layers_per_block": Both(1, 2),
        "norm_num_groups": Both(8, 32),
    }
    model = _diffusers(size, "AutoencoderKL", fields)
    side = at(size, Both(16, 32))
    module = Answers(model.decoder)
    return made(module, noise(4, side, side), at(size, Both(((1,), (3,)), ((1,), (8,)))))


def _pixart(size: Size) -> Model:
    fields = {
        "num_attention_heads": Both(4, 16),
        "attention_head_dim": Both(32, 72),
        "num_layers": Both(2, 8),
        "cross_attention_dim": Both(128, 1152),
        "caption_channels": Both(64, 4096),
        "sample_size": Both(16, 64),
        "norm_num_groups": 8,
        "use_additional_conditions": False,
    }
    model = _diffusers(size, "PixArtTransformer2DModel", fields)
    side, width = at(size, Both(16, 64)), at(size, Both(64, 4096))

    def inputs(shape: Shape, seed: int) -> Tensors:
        latents, step = _denoised(side, 4)(shape, seed)
        states = torch.randn(*shape, 32, width, generator=generator(seed + 9))
        return latents, states, step

    names = ("hidden_states", "encoder_hidden_states", "timestep")
    added = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False}
    return made(Answers(model, names, fixed=added), inputs, at(size, SHAPES), names=names)


ENTRIES: tuple[Entry, ...] = (
    Entry("ddpm_unet", "misc", _ddpm, rank=0),
    Entry("dit", "misc", _dit, rank=0),
    # Trained by four peers side by side it takes more than a GPU has.
    Entry("sd_unet", "misc", _unet, ("diffusers",), rank=0, trained=False),
    Entry("sd_vae_decoder", "misc", _vae, ("diffusers",)),
    Entry("pixart", "misc", _pixart, ("diffusers",)),
)

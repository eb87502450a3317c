# SPDX-License-Identifier: Apache-2.0
"""Image models with attention or token mixing: ViT, Swin, MLP-Mixer, DETR, and a diffusion U-Net."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .convnets import Classifier
from .model import Axis, Model, Shape, Tensors, generator, images, initialized

BATCH = Axis("batch", 1, 4)
FIXED = ((1,), (4,))


def _square(shape: Shape, seed: int, size: int) -> Tensors:
    return images((*shape, size, size), seed)


def _classifier(module: nn.Module, size: int) -> Model:
    names = ("pixel_values",)
    return Model(initialized(module), names, (BATCH,), FIXED, partial(_square, size=size))


def vit() -> Model:
    """ViT-small/16 at 224x224: 12 layers of 384, 22 M parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000
    )
    return _classifier(Classifier(ViTForImageClassification(config)), 224)


def swin() -> Model:
    """Swin-tiny at 224x224: shifted windows of 7x7, 28 M parameters."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    model = _classifier(Classifier(SwinForImageClassification(SwinConfig(num_labels=1000))), 224)
    # At other sizes Python pads the windows, by the size, which no trace keeps.
    return replace(model, declared={"pixel_values": {2: 224, 3: 224}})


class MixerLayer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across = _mlp(tokens, width // 2)
        self.within = _mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = x + self.within(self.norms[1](x))
        return y


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self, size: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        tokens = (size // patch) ** 2
        self.layers = nn.Sequential(*(MixerLayer(tokens, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        return (self.head(self.norm(self.layers(x)).mean(1)),)


def mixer() -> Model:
    """MLP-Mixer-S/16 at 224x224: 8 layers of 512, 18 M parameters."""
    torch.manual_seed(0)
    return _classifier(Mixer(224, 16, 512, 8), 224)


class Detector(nn.Module):
    """DETR's two outputs: scores of classes and boxes, per query."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(pixel_values=pixel_values, pixel_mask=pixel_mask)
        return out.logits, out.pred_boxes


def _detr_inputs(shape: Shape, seed: int) -> Tensors:
    """In every second image the right quarter is padding."""
    batch, height, width = shape
    mask = torch.ones(batch, height, width, dtype=torch.int64)
    mask[1::2, :, width - width // 4 :] = 0
    return (*images(shape, seed), mask)


def detr() -> Model:
    """A small DETR: ResNet-18-like backbone, 3 + 3 layers of 256, 50 queries."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        num_queries=50,
        encoder_layers=3,
        decoder_layers=3,
        num_labels=20,
    )
    module = initialized(
        Detector(DetrForObjectDetection(config)), partial(_detr_inputs, (4, 128, 128), 0)
    )
    names = ("pixel_values", "pixel_mask")
    axes = (BATCH, Axis("height", 64, 256), Axis("width", 64, 256))
    return Model(module, names, axes, ((1, 256, 256), (4, 256, 256)), _detr_inputs)


class Denoiser(nn.Module):
    """A diffusers U-Net's sample."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out: Any = self.unet(sample, timestep, encoder_hidden_states=states, return_dict=False)
        return (out[0],)


def unet() -> Model:
    """UNet-small: Stable Diffusion's UNet2DConditionModel, three levels of 64 to 256 channels."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=256,
        attention_head_dim=8,
        norm_num_groups=16,
    )

    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, height, width, tokens = shape
        rng = generator(seed)
        timestep = torch.randint(0, 1000, (batch,), generator=rng)
        states = torch.randn(batch, tokens, 256, generator=rng)
        return torch.randn(batch, 4, height, width, generator=rng), timestep, states

    axes = (
        BATCH,
        Axis("height", 8, 48, 4),
        Axis("width", 8, 48, 4),
        Axis("tokens", 1, 77),
    )
    names = ("sample", "timestep", "states")
    fixed = ((1, 32, 32, 77), (4, 32, 32, 77))
    return Model(initialized(Denoiser(model)), names, axes, fixed, inputs)

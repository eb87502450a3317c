# SPDX-License-Identifier: Apache-2.0
"""What is trained in bench_compile.py: modules whose forward returns the loss, and functions that make a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """``batch(size, generator)`` are keyword arguments of ``model``."""

    model: nn.Module
    batch: Callable[[int, torch.Generator], Batch]


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def bert_small(length: int = 128) -> Task:
    """BERT-small (4 layers, hidden 512) with dropout, classifying sequences of 128 tokens."""
    return _bert(length, 4, 512)


def bert_base(length: int = 128) -> Task:
    """BERT-base (12 layers, hidden 768) with dropout, on sequences of 128 tokens."""
    return _bert(length, 12, 768)


def bert_tiny(length: int = 12) -> Task:
    """Two layers of 64: for trying a script out."""
    return _bert(length, 2, 64)


def _bert(length: int, layers: int, width: int) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // (64 if width >= 512 else 16),
        intermediate_size=4 * width,
    )

    def batch(size: int, generator: torch.Generator) -> Batch:
        return {
            "input_ids": torch.randint(0, config.vocab_size, (size, length), generator=generator),
            "attention_mask": torch.ones(size, length, dtype=torch.long),
            "labels": torch.randint(0, 2, (size,), generator=generator),
        }

    return Task(_Classifier(BertForSequenceClassification(config)).train(), batch)


class _Denoiser(nn.Module):
    def __init__(self, channels: tuple[int, ...], layers: int, words: int) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        inner = len(channels) - 1
        self.unet = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=channels,
            layers_per_block=layers,
            down_block_types=("CrossAttnDownBlock2D",) * inner + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * inner,
            cross_attention_dim=words,
            attention_head_dim=8,
        )

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, words: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return functional.mse_loss(self.unet(noisy, step, words).sample, noise)


def unet_small(side: int = 32) -> Task:
    """A UNet of diffusers (64, 128, 128 channels) that is to tell the noise in 4 x 32 x 32."""
    return _unet((64, 128, 128), 1, 128, 16, side)


def unet(side: int = 64) -> Task:
    """Stable Diffusion's UNet (860 M parameters) on latents of 4 x 64 x 64 and 77 words of 768."""
    return _unet((320, 640, 1280, 1280), 2, 768, 77, side)


def _unet(channels: tuple[int, ...], layers: int, width: int, words: int, side: int) -> Task:
    def batch(size: int, generator: torch.Generator) -> Batch:
        image = (size, 4, side, side)
        return {
            "noisy": torch.randn(image, generator=generator),
            "step": torch.randint(0, 1000, (size,), generator=generator),
            "words": torch.randn(size, words, width, generator=generator),
            "noise": torch.randn(image, generator=generator),
        }

    return Task(_Denoiser(channels, layers, width).train(), batch)


TASKS: dict[str, Callable[[], Task]] = {
    "bert_small": bert_small,
    "bert_base": bert_base,
    "bert_tiny": bert_tiny,
    "unet_small": unet_small,
    "unet": unet,
}

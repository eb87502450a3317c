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
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048
    )

    def batch(size: int, generator: torch.Generator) -> Batch:
        return {
            "input_ids": torch.randint(0, config.vocab_size, (size, length), generator=generator),
            "attention_mask": torch.ones(size, length, dtype=torch.long),
            "labels": torch.randint(0, 2, (size,), generator=generator),
        }

    return Task(_Classifier(BertForSequenceClassification(config)).train(), batch)


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.unet = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(64, 128, 128),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=128,
            attention_head_dim=8,
        )

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, words: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return functional.mse_loss(self.unet(noisy, step, words).sample, noise)


def unet_small(side: int = 32) -> Task:
    """A UNet of diffusers (64, 128, 128 channels) that is to tell the noise in 4 x 32 x 32."""

    def batch(size: int, generator: torch.Generator) -> Batch:
        image = (size, 4, side, side)
        return {
            "noisy": torch.randn(image, generator=generator),
            "step": torch.randint(0, 1000, (size,), generator=generator),
            "words": torch.randn(size, 16, 128, generator=generator),
            "noise": torch.randn(image, generator=generator),
        }

    return Task(_Denoiser().train(), batch)


TASKS: dict[str, Callable[[], Task]] = {"bert_small": bert_small, "unet_small": unet_small}

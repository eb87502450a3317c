# SPDX-License-Identifier: Apache-2.0
"""Small models to train: each is a module whose forward returns the loss, and a function that makes a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]
FLOAT = torch.float32


@dataclass(frozen=True)
class Task:
    """``batch(size, generator)`` are keyword arguments of ``model``; ``rate`` is a learning rate that works."""

    model: nn.Module
    batch: Callable[[int, torch.Generator], Batch]
    rate: float = 0.05


class LossOf(nn.Module):
    """The loss that a model of transformers computes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


def bert() -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=128,
        vocab_size=8,
    )
    words = 16

    def batch(size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, 8, (size, words), generator=generator)
        mask = torch.ones(size, words, dtype=torch.long)
        mask[::2, words // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}

    return Task(LossOf(BertForSequenceClassification(config)).train(), batch)


def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=20, n_positions=64)

    def batch(size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, 20, (size, 16), generator=generator)
        return {"input_ids": ids, "labels": ids}

    model = GPT2LMHeadModel(config)
    model.config.use_cache = False
    return Task(LossOf(model).train(), batch)


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.short = (
            nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.short(x))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool2d(functional.relu(self.stem(x)), 2)
        return functional.cross_entropy(self.head(self.blocks(y).mean((2, 3))), labels)


def resnet() -> Task:
    def batch(size: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(0, 4, (size,), generator=generator)
        bright = labels[:, None, None, None] - 1.5
        return {"x": torch.randn(size, 3, 16, 16, generator=generator) + bright, "labels": labels}

    return Task(SmallResNet().train(), batch)


class Denoiser(nn.Module):
    """What DreamBooth trains: a UNet of diffusers that is to tell the noise."""

    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.unet = UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
        )

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, words: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return functional.mse_loss(self.unet(noisy, step, words).sample, noise)


def unet() -> Task:
    def batch(size: int, generator: torch.Generator) -> Batch:
        noise = torch.randn(size, 4, 8, 8, generator=generator)
        return {
            "noisy": torch.randn(size, 4, 8, 8, generator=generator) + noise,
            "step": torch.randint(0, 1000, (size,), generator=generator),
            "words": torch.randn(size, 5, 16, generator=generator),
            "noise": noise,
        }

    return Task(Denoiser().train(), batch)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.lstm(self.embed(ids))[0])
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def lstm() -> Task:
    def batch(size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, 50, (size, 12), generator=generator)
        return {"ids": ids, "labels": ids % 5}

    return Task(Tagger().train(), batch, rate=0.5)


TASKS: dict[str, Callable[[], Task]] = {
    "bert": bert,
    "resnet": resnet,
    "unet": unet,
    "gpt2": gpt2,
    "lstm": lstm,
}


def losses(
    task: Task, run: Any, steps: int, size: int = 4, device: str = "cpu", dtype: torch.dtype = FLOAT
) -> list[float]:
    """The loss at each of ``steps`` steps of plain SGD; ``run`` is the model, or what is to stand for it.

    ``dtype``: what autocast computes in.
    """
    optimizer = torch.optim.SGD(task.model.parameters(), lr=task.rate)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    found = []
    for _ in range(steps):
        batch = {name: one.to(device) for name, one in task.batch(size, generator).items()}
        with torch.autocast(device, dtype, enabled=dtype != FLOAT):
            loss = run(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

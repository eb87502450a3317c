# SPDX-License-Identifier: Apache-2.0
"""Speech encoders."""

import torch
from torch import nn

from .model import Axis, Model, Shape, Tensors, generator, initialized


class States(nn.Module):
    """An encoder's last hidden states."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.encoder(features).last_hidden_state,)


def whisper_encoder() -> Model:
    """whisper-tiny's encoder: 4 layers of 384 over 30 s of audio, 1500 positions."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6)
    config.encoder_ffn_dim = 1536

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(*shape, 80, 3000, generator=generator(seed)),)

    module = initialized(States(WhisperEncoder(config)))
    return Model(module, ("features",), (Axis("batch", 1, 2),), ((1,), (2,)), inputs)


def wav2vec2() -> Model:
    """A small wav2vec 2.0: the base model's convolutions at 128 channels, 4 layers of 256."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        conv_dim=(128,) * 7,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(shape, generator=generator(seed)),)

    axes = (Axis("batch", 1, 4), Axis("samples", 1600, 32000))
    module = initialized(States(Wav2Vec2Model(config)))
    return Model(module, ("features",), axes, ((1, 16000), (4, 16000)), inputs)

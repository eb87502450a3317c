# SPDX-License-Identifier: Apache-2.0
"""Text models of transformers, at two layers on a CPU and at the sizes of their bases on a GPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from zoo.model import Axis, Model, Shape, Tensors, padding_mask, token_ids

from suite.entry import Answers, Both, Entry, Size, at, made
from suite.libraries import imported

AXES = (Axis("batch", 1, 8), Axis("length", 8, 128, 8))
SHAPES = Both(((1, 64), (4, 40)), ((1, 128), (32, 128)))
WORDS = Both(4000, 30522)

WIDTH, LAYERS, HEADS, INNER = Both(256, 768), Both(2, 12), Both(4, 12), Both(1024, 3072)
BERT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
LLAMA = {
    **BERT,
    "num_key_value_heads": Both(2, 4),
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}
GPT = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": Both(2, 6),
    "decoder_layers": Both(2, 6),
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "num_layers": Both(2, 6),
    "num_heads": HEADS,
    "d_kv": 64,
    "d_ff": INNER,
}

IDS, MASKED = ("input_ids",), ("input_ids", "attention_mask")
PAIRS = (*MASKED, "decoder_input_ids")
CAUSAL = {"use_cache": False}


def transformer(name: str, kind: str, size: Size, fields: dict[str, Any]) -> Any:
    """``kind`` ("ForCausalLM") of the family ``name`` ("Gpt2"), with random weights."""
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**at(size, fields))
    config._attn_implementation = "sdpa" if _has_sdpa(transformers, name, kind) else "eager"
    return getattr(transformers, f"{name}{kind}")(config)


def _has_sdpa(library: Any, name: str, kind: str) -> bool:
    return bool(getattr(getattr(library, f"{name}{kind}"), "_supports_sdpa", False))


def words(shape: Shape, seed: int, names: Sequence[str], vocabulary: int) -> Tensors:
    """Ids, a mask of what is padding, and the ids that a decoder reads, as ``names`` ask for them."""
    batch, length = shape
    low = token_ids(shape, seed, vocabulary - 10) + 10  # special tokens are the first ones
    found = {
        "input_ids": low,
        "attention_mask": padding_mask(batch, length),
        "decoder_input_ids": low.flip(1)[:, : max(1, length // 2)].contiguous(),
    }
    return tuple(found[name] for name in names)


def _build(
    size: Size,
    name: str,
    kind: str,
    fields: dict[str, Any],
    names: Sequence[str],
    outputs: Sequence[str],
    call: dict[str, Any],
) -> Model:
    model = transformer(name, kind, size, fields)
    vocabulary = model.config.vocab_size
    inputs = partial(words, names=names, vocabulary=vocabulary)
    module = Answers(model, names, outputs, call)
    return made(module, inputs, at(size, SHAPES), AXES, names)


def _entry(
    own: str,
    name: str,
    fields: dict[str, Any],
    kind: str = "Model",
    names: Sequence[str] = MASKED,
    outputs: Sequence[str] = ("last_hidden_state",),
    call: dict[str, Any] | None = None,
    rank: int = 1,
    half: bool = True,
) -> Entry:
    build: Callable[[Size], Model] = partial(
        _build, name=name, kind=kind, fields=fields, names=names, outputs=outputs, call=call or {}
    )
    return Entry(own, "huggingface", build, ("transformers",), rank, half=half)


def _causal(
    own: str, name: str, fields: dict[str, Any], rank: int = 1, kind: str = "ForCausalLM"
) -> Entry:
    return _entry(own, name, fields, kind, IDS, ("logits",), CAUSAL, rank)


def _seq2seq(own: str, name: str, fields: dict[str, Any], rank: int = 1) -> Entry:
    kind = "ForConditionalGeneration"
    return _entry(own, name, fields, kind, PAIRS, ("logits",), CAUSAL, rank)


ENTRIES: tuple[Entry, ...] = (
    _entry("bert", "Bert", BERT, rank=0),
    _entry("roberta", "Roberta", {**BERT, "max_position_embeddings": 514}),
    _entry("albert", "Albert", {**BERT, "embedding_size": 128}, rank=0),
    _entry("electra", "Electra", {**BERT, "embedding_size": 128}),
    _entry("mpnet", "MPNet", BERT),
    _entry("esm", "Esm", {**BERT, "pad_token_id": 1, "position_embedding_type": "rotary"}),
    _entry("roformer", "RoFormer", {**BERT, "embedding_size": WIDTH}),
    _entry("convbert", "ConvBert", {**BERT, "embedding_size": 128}),
    _entry("squeezebert", "SqueezeBert", {**BERT, "embedding_size": WIDTH}),
    _entry(
        "nystromformer", "Nystromformer", {**BERT, "num_landmarks": 8, "segment_means_seq_len": 8}
    ),
    _entry("megatron_bert", "MegatronBert", BERT),
    _entry("layoutlm", "LayoutLM", BERT),
    _entry(
        "fnet", "FNet", {k: v for k, v in BERT.items() if "heads" not in k}, names=IDS, half=False
    ),
    _entry("rembert", "RemBert", {**BERT, "input_embedding_size": 128}),
    _entry(
        "deberta_v2",
        "DebertaV2",
        {
            **BERT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        rank=0,
    ),
    _entry("modernbert", "ModernBert", {**BERT, "pad_token_id": 0, "local_attention": 32}, rank=0),
    _entry("mobilebert", "MobileBert", {"vocab_size": WORDS, "num_hidden_layers": Both(2, 24)}),
    _entry(
        "distilbert",
        "DistilBert",
        {
            "vocab_size": WORDS,
            "dim": WIDTH,
            "n_layers": Both(2, 6),
            "n_heads": HEADS,
            "hidden_dim": INNER,
        },
        rank=0,
    ),
    _entry(
        "xlnet",
        "XLNet",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "d_inner": INNER,
        },
    ),
    _entry(
        "funnel",
        "Funnel",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "n_head": HEADS,
            "d_head": 64,
            "d_inner": INNER,
            "block_sizes": Both([1, 1], [4, 4, 4]),
        },
    ),
    _entry("t5_encoder", "T5", T5, "EncoderModel"),
    _causal("gpt2", "GPT2", GPT, rank=0, kind="LMHeadModel"),
    _causal(
        "gpt_neo",
        "GPTNeo",
        {
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "attention_types": Both([[["global", "local"], 1]], [[["global", "local"], 6]]),
            "window_size": 32,
        },
    ),
    _causal("gpt_neox", "GPTNeoX", BERT),
    _causal("gptj", "GPTJ", {**GPT, "rotary_dim": 32}),
    _causal("codegen", "CodeGen", {**GPT, "n_head": Both(4, 12), "rotary_dim": 32}),
    _causal(
        "opt",
        "OPT",
        {
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": INNER,
            "word_embed_proj_dim": WIDTH,
        },
        rank=0,
    ),
    _causal(
        "bloom",
        "Bloom",
        {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    ),
    _causal(
        "falcon",
        "Falcon",
        {**{k: v for k, v in BERT.items() if k != "intermediate_size"}, "alibi": False},
    ),
    _causal("llama", "Llama", LLAMA, rank=0),
    _causal("mistral", "Mistral", {**LLAMA, "sliding_window": 48}),
    _causal("qwen2", "Qwen2", LLAMA),
    _causal("qwen3", "Qwen3", {**LLAMA, "head_dim": 64}),
    _causal("gemma", "Gemma", {**LLAMA, "head_dim": 64}),
    _causal("gemma2", "Gemma2", {**LLAMA, "head_dim": 64, "sliding_window": 48}),
    _causal("phi", "Phi", {**LLAMA, "num_key_value_heads": HEADS}),
    _causal("olmo", "Olmo", LLAMA),
    _causal("stablelm", "StableLm", LLAMA),
    _causal("mixtral", "Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _causal(
        "mamba", "Mamba", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    ),
    _seq2seq("t5", "T5", T5, rank=0),
    _seq2seq("bart", "Bart", SEQ2SEQ),
    _seq2seq("pegasus", "Pegasus", SEQ2SEQ),
    _seq2seq("mbart", "MBart", SEQ2SEQ),
    _seq2seq("m2m_100", "M2M100", SEQ2SEQ),
    _seq2seq("blenderbot", "BlenderbotSmall", SEQ2SEQ),
)

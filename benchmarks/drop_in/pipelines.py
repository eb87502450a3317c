# SPDX-License-Identifier: Apache-2.0
"""Pipelines of transformers, with random weights (feature-extraction: those of MiniLM)."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from drop_in.program import Change, Program, Scale, minilm_folder, texts


def feature_extraction(scale: Scale) -> Program:
    pipe = transformers.pipeline("feature-extraction", model=minilm_folder())
    return _program(pipe, texts())


def text_classification(scale: Scale) -> Program:
    config = transformers.DistilBertConfig(
        dim=scale.width, n_layers=scale.layers, n_heads=scale.heads, hidden_dim=4 * scale.width
    )
    model = transformers.DistilBertForSequenceClassification(config).eval()
    pipe = transformers.pipeline(
        "text-classification", model=model, tokenizer=_tokenizer(), top_k=None
    )
    return _program(pipe, texts())


def token_classification(scale: Scale) -> Program:
    model = transformers.BertForTokenClassification(_bert(scale, num_labels=5)).eval()
    pipe = transformers.pipeline("token-classification", model=model, tokenizer=_tokenizer())
    return _program(pipe, texts())


def fill_mask(scale: Scale) -> Program:
    model = transformers.BertForMaskedLM(_bert(scale)).eval()
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=_tokenizer())
    masked = [
        "Paris is the [MASK] of France.",
        "The [MASK] was far too long, and the end of it was no [MASK].",
        "I did [MASK] like it at all.",
    ]
    return _program(pipe, masked)


def text_generation(scale: Scale) -> Program:
    pipe = transformers.pipeline("text-generation", model=gpt2(scale), tokenizer=_tokenizer())
    return _program(pipe, texts(), max_new_tokens=scale.new_tokens, do_sample=False)


def image_classification(scale: Scale) -> Program:
    config = transformers.ViTConfig(
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.width,
        image_size=scale.side,
        patch_size=16,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config).eval()
    size = {"height": scale.side, "width": scale.side}
    pipe = transformers.pipeline(
        "image-classification",
        model=model,
        image_processor=transformers.ViTImageProcessor(size=size),
    )
    return _program(pipe, _images(scale, ((1.0, 1.5), (2.0, 1.0), (0.5, 0.7))))


def object_detection(scale: Scale) -> Program:
    """DETR with a ResNet of basic blocks. The threshold is below the scores of random weights: all boxes are kept."""
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[scale.layers // 3 + 1] * 4,
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=scale.width,
        encoder_layers=scale.layers,
        decoder_layers=scale.layers,
        encoder_attention_heads=scale.heads,
        decoder_attention_heads=scale.heads,
        encoder_ffn_dim=4 * scale.width,
        decoder_ffn_dim=4 * scale.width,
        num_queries=20,
    )
    size = {"shortest_edge": 2 * scale.side, "longest_edge": 3 * scale.side}
    pipe = transformers.pipeline(
        "object-detection",
        model=transformers.DetrForObjectDetection(config).eval(),
        image_processor=transformers.DetrImageProcessor(size=size),
    )
    images = _images(scale, ((2.0, 2.5), (3.0, 2.0), (1.0, 1.5)))
    return _program(pipe, images, threshold=0.001)


def speech_recognition(scale: Scale) -> Program:
    """wav2vec 2.0 with a CTC head."""
    config = transformers.Wav2Vec2Config(
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.width,
        conv_dim=[scale.width // 2] * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
    )
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps({letter: k for k, letter in enumerate(letters)}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(path))
    pipe = transformers.pipeline(
        "automatic-speech-recognition",
        model=transformers.Wav2Vec2ForCTC(config).eval(),
        tokenizer=tokenizer,
        feature_extractor=transformers.Wav2Vec2FeatureExtractor(),
    )
    return _program(pipe, _clips(), copied=np.copy)


def whisper(scale: Scale) -> Program:
    words = {f"w{k} ": k for k in range(100)}
    for k, name in enumerate(("endoftext", "startoftranscript", "notimestamps", "0.00")):
        words[f"<|{name}|>"] = 100 + k
    config = transformers.WhisperConfig(
        d_model=scale.width,
        encoder_layers=scale.layers,
        decoder_layers=scale.layers,
        encoder_attention_heads=scale.heads,
        decoder_attention_heads=scale.heads,
        encoder_ffn_dim=4 * scale.width,
        decoder_ffn_dim=4 * scale.width,
        max_source_positions=150,
        vocab_size=len(words),
        pad_token_id=100,
        eos_token_id=100,
        bos_token_id=101,
        decoder_start_token_id=101,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    pipe = transformers.pipeline(
        "automatic-speech-recognition",
        model=transformers.WhisperForConditionalGeneration(config).eval(),
        tokenizer=transformers.WhisperTokenizer(words, []),
        feature_extractor=transformers.WhisperFeatureExtractor(chunk_length=3),
    )
    how = {"max_new_tokens": scale.new_tokens, "max_length": None, "do_sample": False}
    return _program(pipe, _clips(), copied=np.copy, generate_kwargs=how)


def gpt2(scale: Scale) -> Any:
    """A GPT-2 that knows no end of a text."""
    config = transformers.GPT2Config(
        n_embd=scale.width,
        n_layer=scale.layers,
        n_head=scale.heads,
        vocab_size=30522,
        bos_token_id=101,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert(scale: Scale) -> Any:
    return transformers.BertModel(_bert(scale)).eval()


def pipeline_program(pipe: Any, part: str, call: Callable[[Any, int], Any]) -> Program:
    """``call(pipe, k)``, with one line changed: of the module ``pipe.part``, or of the pipeline."""
    found = [pipe]

    def change(f: Change) -> list[torch.nn.Module]:
        setattr(found[0], part, f(getattr(found[0], part)))
        return [getattr(found[0], part)]

    def whole(f: Callable[[Any], Any]) -> Any:
        found[0] = f(found[0])
        return found[0]

    return Program(lambda k: call(found[0], k), change, whole)


def _program(
    pipe: Any, inputs: Sequence[Any], copied: Callable[[Any], Any] = lambda x: x, **how: Any
) -> Program:
    def call(pipe: Any, k: int) -> Any:
        return pipe(copied(inputs[k % len(inputs)]), **how)

    return pipeline_program(pipe, "model", call)


def _tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(minilm_folder())


def _bert(scale: Scale, **more: Any) -> Any:
    return transformers.BertConfig(
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.width,
        **more,
    )


def _images(scale: Scale, sides: Sequence[tuple[float, float]]) -> list[Any]:
    from PIL import Image

    rng = np.random.default_rng(0)
    sizes = [(int(a * scale.side), int(b * scale.side), 3) for a, b in sides]
    return [Image.fromarray(rng.integers(0, 255, size, dtype=np.uint8)) for size in sizes]


def _clips() -> list[Any]:
    """One half to one second of noise, at 16 kHz."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(n).astype(np.float32) for n in (8000, 12345, 16000)]

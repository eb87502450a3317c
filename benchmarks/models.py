# SPDX-License-Identifier: Apache-2.0
"""The models that are measured, by name.

model = MODELS["minilm"]()
model.module(*model.inputs((2, 16), seed=0))     # a tuple of tensors

Weights are random but for MiniLM's, and the same in every run.
"""

from collections.abc import Callable

from zoo import audio, convnets, decoders, recsys, text, vision
from zoo.model import Model

MODELS: dict[str, Callable[[], Model]] = {
    "minilm": text.minilm,
    "bert": text.bert_base,
    "bert_mini": text.bert_mini,
    "albert": text.albert,
    "distilbert": text.distilbert,
    "roberta": text.roberta,
    "t5_encoder": text.t5_encoder,
    "t5_decode": decoders.t5_decode,
    "gpt2_prefill": decoders.gpt2_prefill,
    "gpt2_decode": decoders.gpt2_decode,
    "llama_prefill": decoders.llama_prefill,
    "llama_decode": decoders.llama_decode,
    "vit": vision.vit,
    "swin": vision.swin,
    "mixer": vision.mixer,
    "resnet50": convnets.resnet50,
    "mobilenet_v2": convnets.mobilenet_v2,
    "mobilenet_v3": convnets.mobilenet_v3,
    "efficientnet": convnets.efficientnet,
    "convnext": convnets.convnext,
    "unet": vision.unet,
    "detr": vision.detr,
    "whisper_encoder": audio.whisper_encoder,
    "wav2vec2": audio.wav2vec2,
    "lstm_tagger": text.lstm_tagger,
    "dlrm": recsys.dlrm,
}

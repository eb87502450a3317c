# SPDX-License-Identifier: Apache-2.0
"""The programs by name, and the line of each that changes."""

from drop_in import others, pipelines
from drop_in.program import Row

_PIPE = "pipe.model = blade.accelerate(pipe.model)"
_MODEL = "model = blade.accelerate(model)"

PROGRAMS: dict[str, Row] = {
    "feature-extraction": Row(pipelines.feature_extraction, _PIPE),
    "text-classification": Row(pipelines.text_classification, _PIPE),
    "token-classification": Row(pipelines.token_classification, _PIPE),
    "fill-mask": Row(pipelines.fill_mask, _PIPE),
    "image-classification": Row(pipelines.image_classification, _PIPE, ("PIL",)),
    "object-detection": Row(pipelines.object_detection, _PIPE, ("PIL",)),
    "automatic-speech-recognition": Row(pipelines.speech_recognition, _PIPE),
    "automatic-speech-recognition, Whisper": Row(pipelines.whisper, _PIPE),
    "text-generation": Row(pipelines.text_generation, _PIPE),
    "sentence-transformers encode": Row(others.encode, _MODEL, ("sentence_transformers",)),
    "StableDiffusionPipeline": Row(
        others.stable_diffusion, "pipe.unet = blade.accelerate(pipe.unet)", ("diffusers",)
    ),
    "DiTPipeline": Row(
        others.dit, "pipe.transformer = blade.accelerate(pipe.transformer)", ("diffusers",)
    ),
    "peft LoRA": Row(others.lora, _MODEL, ("peft",)),
    "peft LoRA, generate": Row(
        others.lora_generate,
        'model = blade.accelerate(model, parts=["base_model.model"])',
        ("peft",),
    ),
    "accelerate prepare": Row(others.prepared, _MODEL, ("accelerate",)),
    "FastAPI, 16 threads": Row(others.service, _MODEL, ("fastapi", "httpx")),
}

# SPDX-License-Identifier: Apache-2.0
"""Programs of well-known libraries, one line of each changed: their outputs stay, and no call is left to the model."""

import sys
from pathlib import Path

import pytest
import torch

import blade
from blade.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from programs.program import TINY, Different, Program, difference
from programs.table import PROGRAMS

QUICK = Config(optimization_pipeline="disc", timing=False)
# float32 rounds each of a model's sums differently in another order: 1e-6 of the largest value per layer.
TOLERANCE = 1e-5
CALLS = 3  # that each kind of input is called before its kinds of calls are optimized


def _made(name: str) -> Program:
    torch.manual_seed(0)
    return PROGRAMS[name].make(TINY)


def _check(name: str, turns: int = 1) -> None:
    """The program gives its outputs before, while and after its calls are optimized; then optimized modules answer."""
    expected = [_made(name).run(k) for k in range(3)]
    program = _made(name)
    assert difference(program.run(0), expected[0]) == 0.0  # a program that can be compared
    modules = program.change(lambda module: blade.accelerate(module, config=QUICK))
    for _ in range(turns):
        for _ in range(CALLS):
            for k, output in enumerate(expected):
                assert difference(program.run(k), output) < TOLERANCE
        assert all(blade.wait(module, 300) for module in modules)
    before = [blade.stats(module) for module in modules]
    for k, output in enumerate(expected):
        assert difference(program.run(k), output) < TOLERANCE
    for module, counts in zip(modules, before):
        now = blade.stats(module)
        assert now["original"] == counts["original"], blade.report(module).reasons
        assert now["call 1"]["calls"] > counts["call 1"]["calls"]


@pytest.mark.needs("minilm")
def test_feature_extraction() -> None:
    _check("feature-extraction")


@pytest.mark.needs("minilm")
def test_text_classification() -> None:
    _check("text-classification")


@pytest.mark.needs("minilm")
def test_token_classification() -> None:
    _check("token-classification")


@pytest.mark.needs("minilm")
def test_fill_mask() -> None:
    _check("fill-mask")


@pytest.mark.needs("transformers", "pillow")
def test_image_classification() -> None:
    _check("image-classification")


@pytest.mark.needs("transformers", "pillow")
def test_object_detection() -> None:
    assert len(_made("object-detection").run(0)) > 5  # boxes to compare
    _check("object-detection")


@pytest.mark.needs("transformers")
def test_speech_recognition() -> None:
    assert len(_made("automatic-speech-recognition").run(0)["text"]) > 5
    _check("automatic-speech-recognition")


@pytest.mark.needs("transformers")
def test_speech_recognition_that_generates() -> None:
    name = "automatic-speech-recognition, Whisper"
    assert len(_made(name).run(0)["text"]) > 5
    _check(name, turns=2)


@pytest.mark.needs("minilm")
def test_text_generation() -> None:
    _check("text-generation", turns=2)


@pytest.mark.needs("minilm", "sentence_transformers")
def test_encode() -> None:
    _check("sentence-transformers encode")


@pytest.mark.needs("minilm", "diffusers")
def test_stable_diffusion() -> None:
    _check("StableDiffusionPipeline")


@pytest.mark.needs("diffusers")
def test_dit() -> None:
    _check("DiTPipeline")


@pytest.mark.needs("transformers", "peft")
def test_lora() -> None:
    _check("peft LoRA")


@pytest.mark.needs("transformers", "peft")
def test_lora_that_generates() -> None:
    _check("peft LoRA, generate", turns=2)


@pytest.mark.needs("transformers", "accelerate")
def test_a_prepared_model() -> None:
    _check("accelerate prepare")


@pytest.mark.needs("minilm", "fastapi")
def test_a_service_of_many_threads() -> None:
    _check("FastAPI, 16 threads")


def test_programs_are_compared_by_all_that_they_return() -> None:
    assert difference([{"score": 2.0, "label": "a"}], [{"score": 1.0, "label": "a"}]) == 1.0
    assert difference(torch.ones(2), torch.tensor([1.0, 2.0])) == 0.5
    for found in ([1, 2], [1], (1,), "a", {"a": 1}):
        with pytest.raises(Different):
            difference(found, [1, 3])
    assert difference([1, 3], [1, 3]) == 0.0

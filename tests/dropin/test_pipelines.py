# SPDX-License-Identifier: Apache-2.0
"""Pipelines of transformers with one line changed; test_generation.py has those of text with recorded samples."""

import pytest
import torch
from one_line import Different, check, difference, made


@pytest.mark.needs("minilm")
def test_feature_extraction() -> None:
    check("feature-extraction")


@pytest.mark.needs("minilm")
def test_text_classification() -> None:
    check("text-classification")


@pytest.mark.needs("minilm")
def test_token_classification() -> None:
    check("token-classification")


@pytest.mark.needs("minilm")
def test_fill_mask() -> None:
    check("fill-mask")


@pytest.mark.needs("transformers", "pillow")
def test_image_classification() -> None:
    check("image-classification")


@pytest.mark.needs("transformers", "pillow")
def test_object_detection() -> None:
    assert len(made("object-detection").run(0)) > 5  # boxes to compare
    check("object-detection")


@pytest.mark.needs("transformers")
def test_speech_recognition() -> None:
    name = "automatic-speech-recognition"
    assert len(made(name).run(0)["text"]) > 5
    check(name)


@pytest.mark.needs("transformers")
def test_speech_recognition_that_generates() -> None:
    name = "automatic-speech-recognition, Whisper"
    assert len(made(name).run(0)["text"]) > 5
    check(name, turns=2)


@pytest.mark.needs("minilm")
@pytest.mark.parametrize("name", ["fill-mask", "text-generation"])
def test_a_whole_pipeline(name: str) -> None:
    check(name, turns=2, whole=True)


@pytest.mark.needs("minilm")
def test_text_generation() -> None:
    check("text-generation", turns=2)


def test_outputs_are_compared_to_the_last_value() -> None:
    assert difference([{"score": 2.0, "label": "a"}], [{"score": 1.0, "label": "a"}]) == 1.0
    assert difference(torch.ones(2), torch.tensor([1.0, 2.0])) == 0.5
    assert difference([1, 3], [1, 3]) == 0.0
    for found in ([1, 2], [1], (1, 3), "a", {"a": 1}, torch.ones(2)):
        with pytest.raises(Different):
            difference(found, [1, 3])

# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers with one line changed."""

import pytest
from one_line import check


@pytest.mark.needs("minilm", "diffusers")
def test_stable_diffusion() -> None:
    check("StableDiffusionPipeline", inputs=2)


@pytest.mark.needs("minilm", "diffusers")
def test_a_whole_stable_diffusion() -> None:
    check("StableDiffusionPipeline", inputs=2, turns=2, whole=True)


@pytest.mark.needs("diffusers")
def test_dit() -> None:
    check("DiTPipeline", inputs=2)

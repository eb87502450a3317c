# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers' ``encode`` with the real MiniLM."""

import pytest
from one_line import QUICK, check, difference, minilm_folder, texts

import blade


@pytest.mark.needs("minilm", "sentence_transformers")
def test_encode() -> None:
    check("sentence-transformers encode")


@pytest.mark.needs("minilm", "sentence_transformers")
@pytest.mark.parametrize("part", ["0", "0.model"])
def test_a_part_of_it(part: str) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(minilm_folder())
    expected = [model.encode(text) for text in texts()]
    fast = blade.accelerate(model, config=QUICK, parts=[part])
    for _ in range(3):
        for text, vector in zip(texts(), expected):
            assert difference(fast.encode(text), vector) < 1e-5
        assert blade.wait(fast.get_submodule(part), 300)
    assert blade.stats(fast.get_submodule(part))["call 1"]["calls"] >= len(expected)

# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' models: sizes, names and weights are what ``zoo.model`` promises, on the small ones."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from models import MODELS
from zoo.model import Axis, Model, label

SMALL = ("dlrm", "lstm_tagger")
AXES = (Axis("batch", 1, 4), Axis("width", 8, 24, 8))


def _pooled(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(shape), torch.zeros(3, shape[1] + 1)


def test_random_shapes_keep_to_the_axes() -> None:
    model = Model(torch.nn.Identity(), ("x", "y"), AXES, ((1, 8),), _pooled)
    rng = random.Random(0)
    seen = {model.random_shape(rng) for _ in range(200)}
    assert seen == {(batch, width) for batch in (1, 2, 3, 4) for width in (8, 16, 24)}


def test_dynamic_axes_are_those_that_follow_the_shape() -> None:
    model = Model(torch.nn.Identity(), ("x", "y"), AXES, ((1, 8),), _pooled)
    assert model.dynamic_axes() == [(0, 1), (1,)]


def test_a_label_is_the_sizes() -> None:
    assert label((8, 3, 224)) == "8x3x224"


@pytest.mark.parametrize("name", SMALL)
def test_models_are_the_same_in_every_run_and_answer_tuples(name: str) -> None:
    first, second = MODELS[name](), MODELS[name]()
    assert not any(m.training for m in first.module.modules())
    for shape in first.fixed:
        assert len(shape) == len(first.axes)
    inputs = first.random_inputs(random.Random(1))
    assert len(inputs) == len(first.names)
    with torch.no_grad():
        got, again = first.module(*inputs), second.module(*inputs)
    assert isinstance(got, tuple)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(got, again, strict=True))

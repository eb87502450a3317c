# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' models are what ``zoo.model`` promises; what is counted of them is counted right."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from coverage import calls, instructions
from floor import Machine, Work, count_work, floor_s
from models import MODELS
from zoo.compare import error
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


def test_work_is_products_and_what_they_exchange() -> None:
    layer = torch.nn.Linear(8, 16).requires_grad_(False)
    work = count_work(layer, (torch.randn(4, 8),))
    assert work == Work(2 * 4 * 8 * 16, exchanged=4 * (4 * 8 + 4 * 16), weights=4 * (8 * 16 + 16))


def test_work_of_attention_is_without_its_scores() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    work = count_work(Attention(), (torch.randn(1, 2, 5, 4),))
    assert work.flops == 4 * 2 * 5 * 5 * 4
    assert work.exchanged < 4 * 6 * 2 * 5 * 4


def test_the_floor_is_work_or_weights() -> None:
    machine = Machine(flops=100.0, bytes=10.0, how="")
    assert floor_s(Work(100, exchanged=20, weights=20), machine) == 3.0
    assert floor_s(Work(100, exchanged=20, weights=90), machine) == 9.0


def test_errors_are_relative_and_misplaced_values_infinite() -> None:
    one = torch.tensor([1.0, -4.0])
    assert error((one + 0.5,), (one,)) == 0.125
    assert error((torch.tensor([1]),), (torch.tensor([2]),)) == float("inf")
    assert error((torch.tensor([1.0, torch.nan]),), (torch.tensor([torch.nan, 1.0]),)) == float(
        "inf"
    )
    assert error((one, one), (one,)) == float("inf")


def test_instructions_are_counted_by_kind() -> None:
    lines = ["kernel loop_0 1", "kernel gemm_f32 1", "call aten::pad 2", "call aten::pad 2"]
    program = "\n".join(["slots 0", "instructions 4", *lines, "outputs 0", "end"])
    assert instructions([program]) == {"kernel": 1, "native": 1, "call": 2}
    assert calls([program]) == {"aten::pad": 2}

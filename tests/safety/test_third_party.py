# SPDX-License-Identifier: Apache-2.0
"""Engines of others: fresh memory, the right device and layout, inputs left alone, and drift that is found out."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from fake_backends import Fake, Tensors, produces, registered
from torch import nn

import blade
from blade.core.reason import Code
from blade.runtime.engine import make_engine, register_runner

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
_numbers = itertools.count()
PROGRAM = "\n".join(
    [
        *("blade.disc 1", "isa", "inputs 1", "input 0 f32 cpu 2", "registers 2", "reg 0 dim 0 0"),
        *("reg 1 dim 0 1", "guards 0", "slots 1", "slot 0 output f32 2 0 1", "instructions 0"),
        *("outputs 1 0", "end"),
    ]
)
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


class Ring:
    """Hands out the same few buffers in turns."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.buffers: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __call__(self, outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
        ring = self.buffers.setdefault(
            tuple(outputs[0].shape), [torch.empty_like(outputs[0]) for _ in range(self.count)]
        )
        return [ring[call % self.count].copy_(outputs[0])]


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_answers_that_share_memory(count: int) -> None:
    with registered(Fake(run=Ring(count))):
        config = blade.Config(optimization_pipeline="fake", timing=False)
        optimized = blade.optimize(model(), X, config)
    report = blade.report(optimized)
    reasons = [*report.reasons, *(r for c in report.clusters for r in c.reasons)]
    assert any("lies where an earlier answer does" in reason.detail for reason in reasons)
    answers = [optimized(X * i) for i in range(20)]
    for i, answer in enumerate(answers):
        torch.testing.assert_close(answer, model()(X * i))


def engine_of(run: Run, keeps_inputs: bool = False):
    backend = f"third_{next(_numbers)}"
    register_runner(backend, lambda *_: run, keeps_inputs)
    return make_engine("e", backend, PROGRAM, b"x")


@pytest.mark.parametrize("keeps_inputs", [False, True])
def test_an_input_written_before_it_raises(keeps_inputs: bool) -> None:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        inputs[0].fill_(7)
        raise ValueError("too late")

    x = X.clone()
    engine = engine_of(run, keeps_inputs)
    assert engine.try_execute([x]) is None
    # keeps_inputs is a promise; without it the original computes from what the caller gave
    assert torch.equal(x, X) is not keeps_inputs


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda inputs: [inputs[0].to("meta")], "is on meta"),
        (lambda inputs: [inputs[0].to_sparse()], "not strided"),
    ],
    ids=["device", "layout"],
)
def test_answers_that_are_elsewhere(run: Run, why: str) -> None:
    engine = engine_of(run)
    assert engine.try_execute([X]) is None
    assert why in engine.last_error()
    assert engine.stats()[Code.ENGINE_RAISED.value] == 1


def test_an_answer_in_its_input_is_copied() -> None:
    x = X.clone()
    (y,) = engine_of(lambda inputs: [inputs[0]], keeps_inputs=True).try_execute([x])
    y.fill_(0)
    assert torch.equal(x, X)


class Drifts:
    """Right, until it is told to be wrong."""

    def __init__(self) -> None:
        self.wrong = False

    def __call__(self, outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
        return [o + 1 for o in outputs] if self.wrong else outputs


@produces(Code.DRIFTED)
@pytest.mark.parametrize("background", [False, True])
def test_an_engine_that_drifts_is_retired(background: bool) -> None:
    drifts = Drifts()
    with registered(Fake(run=drifts)):
        config = blade.Config(
            optimization_pipeline="fake", timing=False, recheck=0.25, background=background
        )
        optimized = blade.optimize(model(), X, config)
        if background:
            blade.wait(optimized)
    for i in range(40):
        torch.testing.assert_close(optimized(X * i), model()(X * i))
    stats = blade.stats(optimized)["cluster_0"]
    assert stats["rechecks"] == 10 and stats["engine_runs"] == 40
    drifts.wrong = True
    want = model()(X)
    wrong = [not torch.allclose(optimized(X), want) for _ in range(100)]
    assert sum(wrong) <= 3  # until the first comparison: one call in four is compared
    assert not any(wrong[4:])
    stats = blade.stats(optimized)["cluster_0"]
    assert stats[Code.DRIFTED.value] == 100 - sum(wrong)
    assert stats["rechecks"] == 13  # ten, and three in a row that differed
    blade.rearm(optimized)
    drifts.wrong = False
    optimized(X)
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] > stats["engine_runs"]


def test_one_that_recovers_goes_on() -> None:
    drifts = Drifts()
    with registered(Fake(run=drifts)):
        config = blade.Config(optimization_pipeline="fake", timing=False, recheck=1.0)
        optimized = blade.optimize(model(), X, config)
    want = model()(X)
    for wrong in (False, True, True, False, True, True, False):
        drifts.wrong = wrong
        torch.testing.assert_close(optimized(X), want)
    stats = blade.stats(optimized)["cluster_0"]
    assert (stats["engine_runs"], stats[Code.DRIFTED.value]) == (3, 4)


def test_nothing_is_compared_by_default() -> None:
    with registered(Fake()):
        config = blade.Config(optimization_pipeline="fake", timing=False)
        optimized = blade.optimize(model(), X, config)
    assert "is_due" not in optimized.cluster_0.code
    assert "rechecks" not in blade.stats(optimized)["cluster_0"]

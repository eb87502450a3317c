# SPDX-License-Identifier: Apache-2.0
"""The fp64 run at the first sample, made while a compiler waits for other processes."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from fake_backends import PythonEngine, wrong_values
from verified import cluster

import blade
from blade.backends.disc.backend import DiscBackend
from blade.core.cluster import Cluster
from blade.process.overlap import overlapping, run_while_waiting
from blade.report import Verdict
from blade.verification import prefetch_reference as early_truth
from blade.verification import verify
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.prefetch_reference import PrefetchedReference

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(0)


class Softmax(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(16, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.softmax.int(aten.mul.Tensor(x, self.const_0), -1), aten.exp.default(x)


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.add.Tensor(x, aten.rand_like.default(x)),)


def engine(of: Cluster, **how: Any) -> Any:
    return PythonEngine(of.gm, **how)


@pytest.fixture
def found() -> Cluster:
    return cluster(
        Softmax(), [torch.randn(3, 16, generator=RNG)], [torch.randn(7, 16, generator=RNG)]
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often fp64 ran, by the shape of the input."""
    seen: Counter[tuple[int, ...]] = Counter()
    each = Fp64Reference.each

    def counted(self: Fp64Reference, inputs: tuple[torch.Tensor, ...]) -> Any:
        seen[tuple(inputs[0].shape)] += 1
        return each(self, inputs)

    monkeypatch.setattr(Fp64Reference, "each", counted)
    return seen


def test_verifying_takes_it_and_says_the_same(
    found: Cluster, runs: Counter[tuple[int, ...]]
) -> None:
    early = PrefetchedReference(found)
    early.find()
    assert early.found is not None and runs == {(3, 16): 1}
    verdict = verify.verify(found, engine(found), found.gm, "fake", truth=early.found)
    assert isinstance(verdict, Verdict) and runs[3, 16] == 1
    assert verdict == verify.verify(found, engine(found), found.gm, "fake")
    assert runs[3, 16] == 2


def test_wrong_values_are_found_by_it(found: Cluster) -> None:
    early = PrefetchedReference(found)
    early.find()
    wrong = engine(found, run=wrong_values)
    with_it = verify.verify(found, wrong, found.gm, "fake", truth=early.found)
    assert with_it == verify.verify(found, engine(found, run=wrong_values), found.gm, "fake")
    assert not isinstance(with_it, Verdict)


def test_it_is_known_of_the_very_tensors_alone_and_output_by_output(found: Cluster) -> None:
    truth = verify.reference_of_first(found)
    assert truth is not None
    [x] = found.samples[0]
    first, second = truth.known(found.samples[0]) or ()
    assert torch.equal(second, x.double().exp()) and first.dtype is torch.float64
    assert truth.of([1]).known(found.samples[0]) == [second]
    assert truth.known((x,)) is None and truth.known(found.probes[0]) is None


def test_nothing_is_found_of_what_draws_or_is_large(
    found: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = PrefetchedReference(cluster(Noise(), [torch.randn(3, generator=RNG)], []))
    draws.find()
    assert draws.found is None
    monkeypatch.setattr(early_truth, "LARGEST", 8 * 16 - 1)
    large = PrefetchedReference(found)
    large.find()
    assert large.found is None
    monkeypatch.setattr(early_truth, "LARGEST", 8 * 16)
    large.find()
    assert large.found is not None


def test_an_original_that_will_be_timed_is_compiled_by_torchscript_before(found: Cluster) -> None:
    calls: list[tuple[torch.Tensor, ...]] = []

    def original(*inputs: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        calls.append(inputs)

    PrefetchedReference(found, timed=original).find()
    [x] = found.samples[0]
    assert len(calls) == early_truth.PROFILED and all(given[0] is x for given in calls)
    PrefetchedReference(found, timed=lambda *inputs: 1 // 0).find()  # it raises where it is timed


def test_work_is_done_once_by_the_first_who_waits_inside() -> None:
    done: list[str] = []
    run_while_waiting()
    with overlapping(partial(done.append, "outer")):
        with overlapping(partial(done.append, "inner")):
            run_while_waiting()
            run_while_waiting()
        assert done == ["inner"]
        run_while_waiting()
    run_while_waiting()
    assert done == ["inner", "outer"]


def test_it_is_made_while_a_backend_waits(
    monkeypatch: pytest.MonkeyPatch, runs: Counter[tuple[int, ...]]
) -> None:
    before: list[int] = []
    convert = DiscBackend.convert

    def waits(self: DiscBackend, one: Cluster, config: blade.Config) -> torch.ScriptObject:
        before.append(runs[5, 8])
        run_while_waiting()
        before.append(runs[5, 8])
        return convert(self, one, config)

    monkeypatch.setattr(DiscBackend, "convert", waits)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1)).eval()
    config = blade.Config(
        optimization_pipeline="disc", min_cluster_size=1, timing=False, cache=False
    )
    optimized = blade.optimize(model, torch.randn(5, 8, generator=RNG), config)
    assert before == [0, 1] and runs[5, 8] == 1
    assert [c.backend for c in blade.report(optimized).clusters] == ["disc"]

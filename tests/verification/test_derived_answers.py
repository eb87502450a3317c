# SPDX-License-Identifier: Apache-2.0
"""What the original answers at derived inputs is computed once, in the process apart that tries them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_backends import PythonEngine
from verified import cluster

from blade.core.cluster import Cluster
from blade.core.reason import Reason
from blade.report import Verdict
from blade.verification import derived_inputs
from blade.verification.cases import Case
from blade.verification.verify import try_forked, verify

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(0)


class Softmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.softmax.int(x, -1),)


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.add.Tensor(x, aten.rand_like.default(x)),)


class Attention(torch.nn.Module):
    """The op draws for a dropout above 0 alone."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.scaled_dot_product_attention.default(x, x, x, None, 0.0),)


@pytest.fixture
def tried() -> Iterator[Cluster]:
    found = cluster(Softmax(), [torch.randn(3, 16, generator=RNG)], [torch.randn(7, 5)])
    yield found
    derived_inputs.end(found.gm)


def checked(of: Cluster, calls: list[torch.Size], **engine: Any) -> Verdict | Reason:
    def original(x: torch.Tensor) -> Any:
        calls.append(x.shape)
        return of.gm(x)

    return verify(of, PythonEngine(of.gm, **engine), original, "fake")  # type: ignore[arg-type]


def test_the_original_runs_here_at_samples_and_probes_alone(tried: Cluster) -> None:
    calls: list[torch.Size] = []
    first, second = checked(tried, calls), checked(tried, calls)
    assert isinstance(first, Verdict) and first == second and first.checked > 4
    assert calls == 2 * [torch.Size([3, 16]), torch.Size([7, 5])]


def test_an_op_that_might_draw_does_not_count() -> None:
    found = cluster(Attention(), [torch.randn(2, 3, 16, generator=RNG)])
    calls: list[torch.Size] = []
    verdict = checked(found, calls)
    derived_inputs.end(found.gm)
    assert isinstance(verdict, Verdict) and len(calls) == 1 < verdict.checked


def test_its_answers_are_those_of_a_run_here(
    tried: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = checked(tried, [])
    monkeypatch.setattr(derived_inputs._DerivedTrials, "answer", lambda *_: None)
    calls: list[torch.Size] = []
    assert apart == checked(tried, calls)
    assert len(calls) > 4


def test_an_engine_that_is_wrong_at_other_contents_alone_is_found(tried: Cluster) -> None:
    [sample] = tried.samples[0]

    def wrong(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        known = inputs[0].shape != sample.shape or torch.equal(inputs[0], sample)
        return outputs if known else [2 * t for t in outputs]

    reason = checked(tried, [], run=wrong)
    assert isinstance(reason, Reason) and "contents" in reason.detail


def test_many_bytes_are_computed_again(tried: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_inputs, "KEPT", 0)
    calls: list[torch.Size] = []
    verdict = checked(tried, calls)
    assert isinstance(verdict, Verdict) and len(calls) == verdict.checked


def test_what_draws_numbers_is_asked_again() -> None:
    drawing = cluster(Noise(), [torch.randn(3, 16, generator=RNG)])
    try_forked(drawing, drawing.gm)
    case = Case("contents", "random contents", drawing.samples[0])
    assert derived_inputs.survives(drawing, case)
    assert derived_inputs.answer(drawing, case) is None
    derived_inputs.end(drawing.gm)


def test_without_the_process_the_original_is_asked(tried: Cluster) -> None:
    try_forked(tried, tried.gm)
    survey = derived_inputs._surveys[tried.gm]
    assert not survey.left_out()
    survey._apart.close()
    calls: list[torch.Size] = []
    verdict = checked(tried, calls)
    assert isinstance(verdict, Verdict) and len(calls) == verdict.checked

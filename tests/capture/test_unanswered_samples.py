# SPDX-License-Identifier: Apache-2.0
"""Samples that no captured path answers: a trace that answers them is preferred, and nothing is timed without any."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture import capture
from blade.capture.candidate import CapturedCandidate
from blade.capture.explore_paths import Served, served_by

X = torch.randn(3, 8)


def candidate(differences: int, *unserved: Any) -> Any:
    wrong = [(SimpleNamespace(sample=(torch.ones(2),)), "")] * differences
    left = [(SimpleNamespace(sample=sample), "") for sample in unserved]
    return SimpleNamespace(
        seen=SimpleNamespace(samples=(SAMPLE,)), differences=wrong, unserved=left
    )


SAMPLE = (X,)


def test_a_trace_that_answers_the_samples_is_better_than_one_that_is_right_elsewhere() -> None:
    misses, answers = candidate(0, SAMPLE), candidate(2, (torch.ones(5),))
    assert capture._faults(answers) < capture._faults(misses)
    assert capture._faults(candidate(0)) < capture._faults(candidate(1))


def test_without_a_sample_that_is_answered_the_module_has_no_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(graph: CapturedCandidate) -> Served:
        return replace(served_by(graph), samples=())

    monkeypatch.setattr("blade.capture.capture.served_by", none)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)).eval()
    module = blade.optimize(model, X)
    torch.testing.assert_close(module(X), model(X))

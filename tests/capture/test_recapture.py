# SPDX-License-Identifier: Apache-2.0
"""The second capture of a model traces what the first one found, and searches for nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture import capture as stage
from blade.capture import references
from blade.capture.capture import capture
from blade.config import Config
from blade.core.captured import Captured
from blade.core.reason import Code
from blade.errors import BladeWarning
from blade.selection.cache.fingerprint import forms_of, text_of
from blade.timing.time_budget import TimeBudget


class Known:
    """Records in memory."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def has_any(self, model: nn.Module) -> bool:
        return bool(self.records)

    def key_of(self, frozen: torch.jit.ScriptModule, samples: Sequence[Any]) -> str | None:
        return text_of(frozen.graph) + "".join(forms_of(samples))

    def look_up(self, key: str | None) -> bytes | None:
        return self.records.get(key or "")

    def keep(self, captured: Captured) -> None:
        if captured.record:
            assert captured.key is not None
            self.records[captured.key] = captured.record


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class ByWidth(Plain):
    """Two paths, by the number of columns behind the first two dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if x.shape[0] > 3:
            return vars(self).get("big", y.tanh())  # no script
        return y.relu()


class ByElement(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return vars(self).get("big", y.tanh()) if float(x.sum()) > 0 else y.relu()


class WithoutEffect(Plain):
    """A decision whose outcomes compute the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        assert vars(self)["training"] is False  # no script
        if rows % 2:
            return self.linear(x).relu()
        return torch.relu(self.linear(x))


class Grows(Plain):
    """A loop that has another number of turns at one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        while y.shape[0] < x.shape[0] * 2 and vars(self)["training"] is False:
            y = torch.cat([y, y[: len(y) // 2 + 1]])
        return y


@pytest.fixture
def known() -> Known:
    return Known()


def twice(model: nn.Module, x: torch.Tensor, known: Known, **fields: Any) -> list[Captured]:
    found = []
    for _ in range(2):
        found.append(capture(model.eval(), x, Config(**fields), known))
        known.keep(found[-1])
    return found


@pytest.mark.filterwarnings(f"ignore::{BladeWarning.__module__}.{BladeWarning.__name__}")
@pytest.mark.parametrize("kind", [Plain, ByWidth, ByElement, WithoutEffect, Grows])
def test_it_is_the_same_as_the_first(kind: type[nn.Module], known: Known) -> None:
    torch.manual_seed(0)
    model = kind()
    first, second = twice(model, torch.randn(3, 8), known)
    assert first.record and first.is_compared and not second.is_compared
    assert text_of(first.module.graph) == text_of(second.module.graph)
    for name in ("how", "paths", "ends", "reasons", "limits", "fixed", "structure"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("samples", "probes"):
        for a, b in zip(getattr(first, name), getattr(second, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for one in second.references:
        torch.testing.assert_close(one.answers[0][0], model(*one.sample))
    assert any(one.how for one in second.references)  # an input that is no sample


def test_nothing_is_tried(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ByWidth(), torch.randn(3, 8)
    known.keep(capture(model.eval(), x, Config(), known))

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("tried again")

    monkeypatch.setattr(references, "_ReferenceRunner", never)
    monkeypatch.setattr(stage, "_trace_or_script", never)
    assert len(capture(model, x, Config(), known).paths) == 2


def test_other_code_or_settings_are_captured_anew(known: Known) -> None:
    x = torch.randn(3, 8)
    first = capture(ByWidth().eval(), x, Config(), known)
    known.keep(first)
    other = capture(Plain().eval(), x, Config(), known)
    assert other.is_compared and len(other.paths) == 1
    fewer = capture(ByWidth().eval(), x, Config(max_paths=1, allow_tracing=True), known)
    assert fewer.is_compared and len(fewer.paths) == 1
    wider = capture(ByWidth().eval(), torch.randn(3, 2, 8), Config(), known)
    assert wider.is_compared


def test_a_record_of_another_result_is_not_used(known: Known) -> None:
    """A check that was moved elsewhere leaves another graph than the one that was compared."""
    x = torch.randn(3, 8)
    first = capture(ByWidth().eval(), x, Config(), known)
    assert b"x.size(0)" in first.record
    known.keep(
        replace(first, record=first.record.replace(b"> 3", b"> 2").replace(b"<= 3", b"<= 2"))
    )
    second = capture(ByWidth().eval(), x, Config(), known)
    assert second.is_compared and second.paths == first.paths


def test_what_no_path_answers_is_told_again(known: Known) -> None:
    for _ in range(2):
        with pytest.warns(BladeWarning, match="size"):
            captured = capture(ByWidth().eval(), torch.randn(5, 8), Config(max_paths=1), known)
        known.keep(captured)
        assert Code.TRACE_SPECIALIZED in {one.code for one in captured.reasons}
    assert not captured.is_compared


def test_what_was_cut_short_is_looked_for_with_more_time(known: Known) -> None:
    model, x = ByWidth().eval(), torch.randn(5, 8)
    short = Config(allow_tracing=True, time_budget=10)
    first = capture(model, x, short, known, TimeBudget(0.0))
    assert Code.TIME_BUDGET in {one.code for one in first.reasons}
    known.keep(first)
    for seconds, is_compared in ((10, False), (5, False), (20, True), (None, True)):
        config = short.evolve(time_budget=seconds)
        again = capture(model, x, config, known)
        assert again.is_compared == is_compared
        assert len(again.paths) == 1 + is_compared

# SPDX-License-Identifier: Apache-2.0
"""No answer for a path that was not taken: every row of the table, called at inputs that were not sampled."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import decision_check
import on_arguments  # noqa: F401 - each adds its rows to the table
import on_library_code  # noqa: F401
import on_lists  # noqa: F401
import on_loops  # noqa: F401
import on_numbers  # noqa: F401
import on_sizes  # noqa: F401
import on_values  # noqa: F401
import pytest
import torch
from decision_check import Score, call, judge, why_differs
from decision_table import CALLS, ROWS, Row
from torch import nn

MODES: dict[str, dict[str, bool]] = {
    "fallback": {"python_fallback": True},
    "alone": {"python_fallback": False},
    "loaded": {"python_fallback": False, "is_loaded": True},
    "traced": {"python_fallback": False, "is_loaded": True, "is_traced": True},
}

every_row = pytest.mark.parametrize("sample", ROWS.values(), ids=lambda row: row.name)


def assert_no_failure(row: Row, mode: str) -> None:
    raises = mode in row.raises_in
    score = judge(row, **MODES[mode], samples_may_raise=raises)
    assert score.failures == []
    refused = mode in row.refused_in
    assert bool(score.refused) == refused, score.refused or "optimize takes it now"
    assert score.sample_raised or not raises
    # TorchScript may refuse all arguments but tensors, with a text that names them
    answered = score.sample_paths or score.raised == CALLS or raises
    assert score.refused or answered, "the sample was not answered by what was captured"


FIRST = {name: list(MODES)[k % len(MODES)] for k, name in enumerate(ROWS)}
"""One mode per row; the others are tested before a release."""


@pytest.mark.needs("runtime", "torch_mlir")
@every_row
def test_no_answer_is_wrong(sample: Row) -> None:
    assert_no_failure(sample, FIRST[sample.name])


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in ROWS for mode in MODES if mode != FIRST[name]]
)
def test_no_answer_is_wrong_in_other_modes(name: str, mode: str) -> None:
    assert_no_failure(ROWS[name], mode)


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.filterwarnings("ignore:A call that no captured path answers changed the state")
def test_a_state_that_the_original_writes_is_not_missed_by_a_path() -> None:
    score = judge(ROWS["RunningMaximum"], python_fallback=True, is_traced=True)
    assert score.failures == []
    assert score.paths + score.fallback == CALLS
    assert score.paths > 0


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_counter_that_is_read_as_a_number_is_named() -> None:
    refusal = judge(ROWS["EverySecondCall"]).refused
    assert "writes to calls and reads it as a Python number" in refusal


def test_the_table_is_large_enough() -> None:
    assert len(ROWS) >= 64
    assert len({row.kind for row in ROWS.values()}) == len(ROWS)
    assert CALLS == 50


def test_rows_have_marked_lines() -> None:
    assert [row.name for row in ROWS.values() if not row.marked_lines()] == []


@every_row
def test_the_calls_go_to_all_sides(sample: Row) -> None:
    """Some call reaches each line of the model, and a trace of the sample is wrong at some call."""
    model = sample.make()
    with _lines(sample) as missing:
        wanted = [call(model, inputs) for inputs in sample.calls()]
    assert sample.is_fixed or missing == set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced = _trace(sample.make(), sample.first())
        except (NameError, RuntimeError, TypeError, ValueError):
            return
    differs = [
        want.error is not None or _differs(traced, inputs, want)
        for inputs, want in zip(sample.calls(), wanted, strict=True)
    ]
    assert any(differs) != sample.is_fixed


def _trace(model: nn.Module, inputs: Any) -> torch.jit.ScriptModule:
    given = (
        {"example_kwarg_inputs": inputs} if isinstance(inputs, dict) else {"example_inputs": inputs}
    )
    return torch.jit.trace(model, **given, check_trace=False, strict=False)


def _differs(traced: Callable[..., Any], inputs: Any, want: Any) -> bool:
    with torch.jit.optimized_execution(False):  # or it compiles for every shape
        got = call(traced, inputs)
    return got.error is not None or why_differs(got, want) != ""


@contextmanager
def _lines(row: Row) -> Iterator[set[int]]:
    """The lines of the row's model that nothing has run yet."""
    codes, left = {*row.codes()}, {*row.lines()}

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        left.discard(frame.f_lineno)
        return local

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code in codes else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield left
    finally:
        sys.settrace(before)


class _Instead(nn.Module):
    """What ``optimize`` is replaced by, to judge the judge: it answers like a function of the original."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.model, *inputs)


def judged(
    monkeypatch: pytest.MonkeyPatch, row: str, function: Callable[..., Any], **mode: bool
) -> Score:
    def optimize(row: Row, *mode: bool) -> _Instead:
        return _Instead(row.make(), function)

    monkeypatch.setattr(decision_check, "optimize", optimize)
    return judge(ROWS[row], **mode)


def test_the_original_itself_is_right_and_is_counted_as_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = judged(monkeypatch, "Confident", lambda model, x: model(x))
    assert (score.fallback, score.failures) == (CALLS, [])


def test_one_side_for_all_calls_is_wrong_at_those_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = judged(monkeypatch, "FirstElement", lambda model, x: torch.cumsum(x, -1) * 0.5)
    assert 0 < len(score.wrong) < CALLS
    assert score.paths == CALLS - len(score.wrong)


def test_an_answer_where_the_original_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    score = judged(monkeypatch, "Asserts", lambda model, x: x.clamp(0).sqrt() * 2 + 1)
    assert all("original raises" in why for why in score.wrong)
    assert 0 < len(score.wrong) < CALLS


@pytest.mark.parametrize("what", ["values", "dtype", "shape", "count"])
def test_other_answers_are_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "values": lambda y: y * 1.001,
        "dtype": lambda y: y.double(),
        "shape": lambda y: y[None],
        "count": lambda y: (y, y),
    }
    score = judged(monkeypatch, "Confident", lambda model, x: changes[what](model(x)))
    assert len(score.wrong) == CALLS


@pytest.mark.parametrize("offset", [0, 1])
def test_an_error_has_to_name_the_line(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"on_values.py:{min(ROWS['Confident'].marked_lines()) + offset}"

    def refuse(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no path fits: {place}, float(...) > 0.5 was False")

    score = judged(monkeypatch, "Confident", refuse, python_fallback=False)
    assert (score.raised, len(score.unnamed)) == ((CALLS, 0) if offset == 0 else (0, CALLS))
    beside = judged(monkeypatch, "Confident", refuse, python_fallback=True)
    assert len(beside.unnamed) == CALLS  # the original could have answered


def test_an_error_after_a_write_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"on_arguments.py:{min(ROWS['WritesThenDecides'].marked_lines())}"

    def write(model: nn.Module, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(torch.tanh(x))
        raise RuntimeError(f"no path fits: {place}")

    score = judged(monkeypatch, "WritesThenDecides", write, python_fallback=False)
    assert (score.raised, len(score.unnamed)) == (0, CALLS)


def test_a_write_that_is_left_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    score = judged(monkeypatch, "WritesThenDecides", lambda m, x, cache: m(x, cache.clone()))
    assert len(score.wrong) == CALLS

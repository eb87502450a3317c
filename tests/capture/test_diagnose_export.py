# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be captured: the error names each line that stops an export, and nothing else is changed."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture import capture as capture_module
from blade.capture import diagnose_export as diagnose_module
from blade.capture.capture import capture
from blade.capture.diagnose_export import diagnose_export
from blade.capture.references import run_references
from blade.config import Config
from blade.core.reason import Code
from blade.errors import InputError
from blade.timing.time_budget import UNLIMITED, TimeBudget

SOURCE = Path(__file__).read_text().splitlines()


def line(code: str) -> str:
    """``file.py:line ``, as errors begin with it, of the only line that is ``code``."""
    [number] = [k for k, text in enumerate(SOURCE, 1) if text.strip() == code]
    return f"{Path(__file__).name}:{number} "


class Layered(nn.Module):
    """Calls ``function``, which no script understands, with its layer."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x)


def _ends(x: torch.Tensor) -> torch.Tensor:
    """Control flow that no trace takes."""
    return torch.cond(x.sum() > 0, lambda a: torch.relu(a), lambda a: a * 2, (x,))


def _branches(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.mean() > 3:
        x = x + 1
    y = _ends(layer(x))
    scale = float(y.max())
    return y * scale


def _exports(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _ends(layer(x))


@torch.library.custom_op("blade_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("blade_tests::wrong_fake", mutates_args=())
def wrong_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@wrong_fake.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(7, 8)


def _own_ops(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = wrong_fake(x)
    x = no_fake(x)
    return _ends(layer(x))


def _steps(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    if x.shape[0] % 2 == 0:
        y = y + 1
    for step in range(x.shape[1]):
        y = y + step
    return _ends(y)


def _many(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x) + int(9 * x[0, 0, 0])
    y = y + int(9 * x[0, 0, 1])
    y = y + int(9 * x[0, 0, 2])
    y = y + int(9 * x[0, 0, 3])
    y = y + int(9 * x[0, 0, 4])
    y = y + int(9 * x[0, 0, 5])
    y = y + int(9 * x[0, 0, 6])
    y = y + int(9 * x[0, 0, 7])
    y = y + int(9 * x[0, 1, 0])
    y = y + int(9 * x[0, 1, 1])
    return _ends(y)


@pytest.fixture(params=[True, False], ids=["as it is", "copied"])
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Diagnose the model, or a copy on the CPU as for a model on a GPU."""
    if not request.param:
        monkeypatch.setattr(diagnose_module, "can_try", lambda values: False)
    yield


def _error(model: nn.Module, inputs: Any) -> list[str]:
    """The lines of the error that are about the export."""
    with pytest.raises(InputError, match="neither traced nor scripted") as caught:
        capture(model, inputs, Config())
    head, _, rest = str(caught.value).partition("torch.export is no way out:\n")
    assert "[trace_failed]" in head and "[script_failed]" in head
    return [text.strip() for text in rest.splitlines()]


@pytest.mark.usefixtures("_where")
def test_decisions_on_values_are_named_and_nothing_is_changed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Layered(_branches).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = run_references(model, torch.randn(2, 10, 8), Config(), bake=True)
    attributes = dict(vars(model))
    log = logging.getLogger("torch.__trace")
    handler = torch._logging._internal.LazyTraceHandler("nowhere")
    log.addHandler(handler)
    handlers, random, folder = list(log.handlers), torch.get_rng_state(), tempfile.gettempdir()
    files = set(Path(folder).glob("export_*/*"))
    capfd.readouterr()
    try:
        found = [one.detail for one in diagnose_export(seen, (), UNLIMITED)]
        assert log.handlers == handlers
    finally:
        log.removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    assert [text.partition(" ")[0] + " " for text in found] == [
        line("if x.mean() > 3:"),
        line("scale = float(y.max())"),
    ]
    assert "decides on a value that only a call knows: if x.mean() > 3:" in found[0]
    assert "torch.cond" in found[0]
    assert "makes a Python number of a value" in found[1]
    assert torch.equal(torch.get_rng_state(), random)
    assert tempfile.gettempdir() == folder and set(Path(folder).glob("export_*/*")) == files
    assert vars(model) == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Remembers(nn.Module):
    """Leaves its last input behind, in a buffer and an attribute, in the diagnosis alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8))
        self.writes = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.writes:
            self.last.add_(1)
            self.seen = len(x.shape)
        table = {True: torch.relu, False: torch.sin}
        return _ends(table[bool(x.mean() > 3)](x))


def test_the_state_of_the_model_is_restored() -> None:
    model = Remembers().eval()
    seen = run_references(model, torch.randn(2, 8), Config(), bake=True)
    model.writes = True
    found = diagnose_export(seen, (), UNLIMITED)
    assert any("table[bool(x.mean() > 3)]" in one.detail for one in found)
    assert torch.equal(model.last, torch.zeros(8)) and not hasattr(model, "seen")


def test_ops_without_a_right_fake_kernel_are_named() -> None:
    found = _error(Layered(_own_ops).eval(), torch.randn(2, 10, 8))
    [wrong] = [text for text in found if text.startswith(line("x = wrong_fake(x)"))]
    assert "blade_tests::wrong_fake, whose fake kernel is wrong: mismatch" in wrong
    [missing] = [text for text in found if text.startswith(line("x = no_fake(x)"))]
    assert "blade_tests::no_fake, whose fake kernel is missing: x = no_fake(x)." in missing
    assert '@torch.library.register_fake("blade_tests::no_fake")' in missing


def test_a_decision_on_a_size_that_varies_is_named() -> None:
    model = Layered(_steps).eval()
    found = _error(model, [torch.randn(2, 10, 8), torch.randn(2, 4, 8)])
    [size] = [text for text in found if text.startswith(line("for step in range(x.shape[1]):"))]
    assert "(Eq(x.size(1), 10) does not hold where x.size(1) is 4)" in size
    # The other decision holds at both samples.
    assert not any(text.startswith(line("if x.shape[0] % 2 == 0:")) for text in found)


def test_many_failures_are_counted() -> None:
    found = _error(Layered(_many).eval(), torch.rand(2, 10, 8) + 1)
    assert len(found) == 8 and found[-1].endswith("There are 2 more.")


def test_no_time_is_left() -> None:
    seen = run_references(Layered(_branches).eval(), torch.randn(2, 10, 8), Config(), bake=True)
    [one] = diagnose_export(seen, (), TimeBudget(0.5))
    assert one.code is Code.TIME_BUDGET and "Config.time_budget=0.5" in one.detail


def test_a_diagnosis_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: Any, **kwargs: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(torch.export, "draft_export", endless)
    seen = run_references(Layered(_branches).eval(), torch.randn(2, 10, 8), Config(), bake=True)
    [one] = diagnose_export(seen, (), TimeBudget(2.0))
    assert one.code is Code.EXPORT_FAILED and "did not come back within 2 s" in one.detail


@pytest.mark.filterwarnings("ignore::blade.errors.BladeWarning")
@pytest.mark.parametrize(
    ("function", "how"), [(lambda layer, x: layer(x), "trace"), (_exports, "export")]
)
def test_what_can_be_captured_is_not_diagnosed(
    function: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "diagnose_export", None)
    captured = capture(Layered(function).eval(), torch.randn(2, 10, 8), Config(strict=False))
    assert captured.how == how

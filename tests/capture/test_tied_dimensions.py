# SPDX-License-Identifier: Apache-2.0
"""Sizes that are equal in the samples, and that the model lets differ where its trace cannot."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.core.captured import Captured, EqualSizes
from blade.core.reason import Code
from blade.errors import InputError


class Masked(nn.Module):
    """Pads a mask that is shorter than the states, in Python that no script understands, and not while traced:
    such a decision is seen by nobody."""

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        missing = 0 if torch.jit.is_tracing() else states.shape[2] - mask.shape[1]
        ways = {True: lambda m: nn.functional.pad(m, (0, missing)), False: lambda m: m}
        mask = ways[missing > 0](mask)
        return torch.relu(states * mask[:, None, : states.shape[2], None]) + 1


class MaskedOnce(Masked):
    """Besides, decides on a size that nothing is equal to."""

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ways = {True: 2.0, False: 3.0}
        is_wide = torch.jit.is_tracing() or states.shape[3] > 4
        return super().forward(states, mask) * ways[is_wide]


def _inputs(batch: int, length: int, width: int = 5, mask: int | None = None) -> Any:
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(batch, 2, length, width, generator=rng)
    return states, torch.rand(batch, length if mask is None else mask, generator=rng)


def _captured(model: nn.Module, config: Config | None = None) -> Captured:
    return capture(model.eval(), _inputs(3, 7), config or Config())


def test_a_trace_is_kept_where_the_sizes_are_equal() -> None:
    captured = _captured(Masked())
    assert captured.equal_sizes == (EqualSizes((1, 1), (0, 2)),)
    [reason] = [r for r in captured.reasons if "like those given" in r.detail]
    assert reason.code is Code.TRACE_SPECIALIZED
    assert "axis 1 of 'mask' is as long as axis 2 of 'states'" in reason.detail
    for sizes in ((1, 1, 1), (3, 7, 5), (2, 9, 4)):
        inputs = _inputs(*sizes)
        torch.testing.assert_close(captured.module(*inputs), Masked()(*inputs))


@pytest.mark.parametrize("mask", [5, 9])
def test_elsewhere_the_trace_does_not_answer(mask: int) -> None:
    captured = _captured(Masked())
    with pytest.raises(Exception, match="axis 1 of 'mask' is as long as"):
        captured.module(*_inputs(3, 7, mask=mask))


class OfOneSize(nn.Module):
    """A legacy constructor, whose sizes torch's tracer keeps as constants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + torch.Tensor(x.shape[0], 4).fill_(2)


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize(
    ("model", "inside", "others"),
    [
        (Masked(), _inputs(3, 7), [_inputs(3, 7, mask=5), _inputs(2, 6, mask=9)]),
        (OfOneSize(), (torch.randn(3, 4),), [(torch.randn(1, 4),), (torch.randn(6, 4),)]),
    ],
    ids=["equal sizes", "one size"],
)
def test_elsewhere_the_original_answers(
    model: nn.Module, inside: Any, others: list[Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = blade.optimize(model.eval(), inside, Config(timing=False))
    for inputs in (inside, *others):
        assert torch.equal(module(*inputs), model(*inputs))
    if isinstance(model, OfOneSize):
        assert "Elsewhere the original model answers" in str(told[0].message)
        assert blade.report(module).paths[0][-1] == "axis 0 of 'x' must be 3"
    torch.jit.save(module, tmp_path / "model.pt")
    code = f"""
import torch, blade
module = torch.jit.load({str(tmp_path / "model.pt")!r})
given = torch.load({str(tmp_path / "inputs.pt")!r})
try:
    module(*given)
except RuntimeError as error:
    print(error)
"""
    torch.save(others[0], tmp_path / "inputs.pt")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert "No captured path answers this call" in ran.stdout
    assert "call the original model here" in ran.stdout


def test_a_size_that_cannot_vary_may_equal_theirs() -> None:
    class Wide(Masked):
        def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(states, mask) * torch.arange(7)  # the width is 7

    captured = capture(Wide().eval(), _inputs(3, 7, width=7), Config())
    assert captured.equal_sizes == (EqualSizes((1, 1), (0, 2)),)
    inputs = _inputs(2, 9, width=7)
    torch.testing.assert_close(captured.module(*inputs), Wide()(*inputs))


def test_probes_keep_to_it() -> None:
    for states, mask in _captured(Masked()).probes:
        assert states.shape[2] == mask.shape[1]


def test_what_a_tie_does_not_cover_is_still_refused() -> None:
    with pytest.raises(InputError, match="differs from the model") as caught:
        _captured(MaskedOnce(), Config(strict=True))
    # The diagnosis of an export names the line.
    stops = str(caught.value).partition("torch.export is no way out:")[2]
    assert f"{Path(__file__).name}:" in stops and "mask = ways[missing > 0](mask)" in stops


@pytest.mark.needs("runtime", "torch_mlir")
def test_engines_serve_it() -> None:
    config = blade.Config(timing=False, min_cluster_size=1)
    optimized = blade.optimize(Masked().eval(), _inputs(3, 7), config)
    for sizes in ((1, 1), (3, 7), (2, 9)):
        inputs = _inputs(*sizes)
        torch.testing.assert_close(optimized(*inputs), Masked()(*inputs))
    [counters] = blade.stats(optimized).values()
    assert counters["engine_runs"] == counters["calls"] == 3
    with pytest.raises(Exception, match="axis 1 of 'mask' is as long as"):
        optimized(*_inputs(3, 7, mask=9))

# SPDX-License-Identifier: Apache-2.0
"""Modules by way of torch.export: right at other sizes and contents, or an error that names the condition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exported_models import Computes, Counts, interface
from fake_backends import produces
from torch import nn
from torch.nn import functional as F

from blade.capture.exported.export_script import export_script
from blade.core.reason import Code, Reason

SIZES = ((1, 1), (1, 7), (4, 14), (2, 13), (5, 20), (5, 9), (3, 0), (0, 8))


def _pads(x: torch.Tensor) -> torch.Tensor:
    batch, length = x.shape
    if length % 7:
        x = F.pad(x, (0, 7 - length % 7))
    return x.reshape(batch, -1, 7).sum(1)


def _positions(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(x.shape[0], 1) + torch.arange(x.shape[1])


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x * 5 if x.shape[0] == 1 else x - 1


def _blocks(x: torch.Tensor) -> torch.Tensor:
    total = x[:, :0].sum(1)
    for start in range(0, x.shape[1], 4):
        total = torch.tanh(total + x[:, start : start + 4].sum(1))
    return total


@pytest.mark.parametrize("function", [_pads, _positions, _alone, _blocks], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sample", [(2, 9), (1, 14)], ids=str)
def test_an_answer_is_right_or_an_error(
    function: Callable[..., Any], sample: tuple[int, int]
) -> None:
    x = torch.randn(sample)
    module = export_script(Computes(function), interface(x))
    assert isinstance(module, torch.jit.ScriptModule), module
    torch.testing.assert_close(module(x), function(x))
    served = 0
    for sizes in SIZES:
        x = torch.randn(sizes)
        try:
            got = module(x)
        except (torch.jit.Error, RuntimeError) as error:
            assert "does not hold" in str(error) or 0 in sizes
        else:
            torch.testing.assert_close(got, function(x))
            served += 1
    assert served >= (2 if function is not _blocks else 1)


def test_sizes_that_stay_fixed() -> None:
    x = torch.randn(2, 9)
    module = export_script(Computes(torch.relu), interface(x), fixed={(0, 1)})
    assert isinstance(module, torch.jit.ScriptModule)
    module(torch.randn(5, 9))
    with pytest.raises(torch.jit.Error, match=r"inputs_0.size\(1\) == 9 does not hold"):
        module(torch.randn(2, 8))


def test_weights_and_buffers_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counts()).eval()
    module = export_script(model, interface(torch.randn(2, 3)))
    assert isinstance(module, torch.jit.ScriptModule)
    model[1].calls.zero_()
    for _ in range(2):
        module(torch.randn(2, 3))
    assert model[1].calls == 2
    assert dict(module.named_parameters())["0.weight"].data_ptr() == model[0].weight.data_ptr()


def _decides(x: torch.Tensor) -> torch.Tensor:
    if float(x.sum()) > 0:
        return x * 2
    return x


@produces(Code.EXPORT_FAILED)
def test_a_decision_on_a_value_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    found = export_script(Computes(_decides), interface(torch.randn(2, 3)))
    assert isinstance(found, Reason) and found.code is Code.EXPORT_FAILED
    assert "test_export_script.py:" in found.detail
    assert "if float(x.sum()) > 0:" in found.detail
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_model() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    found = export_script(Computes(fails), interface(torch.randn(2, 3)))
    assert isinstance(found, Reason)
    assert "ValueError" in found.detail and "not today" in found.detail

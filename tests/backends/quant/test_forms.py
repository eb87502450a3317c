# SPDX-License-Identifier: Apache-2.0
"""Which products of 8 bits are permitted and served where, and what is said where none is."""

import pytest
import torch

from blade.backends.quant import device_dtypes as forms
from blade.backends.quant.backend import QuantBackend
from blade.config import Config
from blade.core.reason import Code
from blade.errors import Refused
from blade.partition.support import resolve

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BOTH = Config(enable_fp8=True, enable_int8=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """``gpu["capability"]`` is that of the device."""
    said = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: said["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    return said


@pytest.mark.parametrize(
    ("capability", "names"),
    [((9, 0), ["fp8", "int8"]), ((8, 9), ["fp8", "int8"]), ((8, 6), ["int8"]), ((7, 5), [])],
)
def test_what_a_gpu_has(
    gpu: dict[str, tuple[int, int]], capability: tuple[int, int], names: list[str]
) -> None:
    gpu["capability"] = capability
    assert list(forms.device_dtypes(CUDA, BOTH)) == names
    assert list(forms.device_dtypes(CUDA, Config(enable_int8=True))) == names[-1:]
    assert sorted(QuantBackend().precisions) == sorted({"int8", *names})


def test_what_is_said_of_an_older_gpu(gpu: dict[str, tuple[int, int]]) -> None:
    gpu["capability"] = (8, 0)
    why = forms.why_not_device(CUDA, Config(enable_fp8=True))
    assert why == "A GPU has compute capability 8.0: floats of 8 bits take 8.9 or later, bytes 8.0"
    assert forms.why_not_device(CUDA, BOTH) is None


def test_a_cpu_has_no_floats_of_8_bits() -> None:
    assert forms.why_not_device(CPU, Config(enable_fp8=True)) is not None
    assert forms.why_not_device(CPU, BOTH) is None
    assert forms.why_not_device(torch.device("meta"), BOTH) is not None


def test_products_with_float_activations_are_refused() -> None:
    forms.check_kind(BOTH)
    with pytest.raises(Refused, match='"dynamic" and "static" are served on a GPU') as caught:
        forms.check_kind(Config(enable_int8=True, quantization_type="weight_only"))
    assert caught.value.code == Code.UNSUPPORTED_OP


@pytest.mark.needs("runtime", "torch_mlir")
def test_without_a_gpu_the_permission_is_said_to_have_no_effect() -> None:
    _, reasons = resolve(Config(enable_fp8=True))
    (reason,) = [r for r in reasons if r.subject == "fp8"]
    assert reason.code == Code.BACKEND_UNAVAILABLE and "compute capability 8.9" in reason.detail

# SPDX-License-Identifier: Apache-2.0
"""What is said where a model on a GPU cannot be compiled, and what to do about it."""

from collections.abc import Callable

import pytest
import torch

from blade.backends.disc.backend import DiscBackend, _why_not_device
from blade.backends.disc.gpu import available

Missing = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that has everything, by what it says."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(available.cuda, "why_unavailable", lambda: "")
    monkeypatch.setattr(available, "find_spec", lambda _: object())
    return monkeypatch


def test_where_all_is_there_a_gpu_is_served(all_there: pytest.MonkeyPatch) -> None:
    assert available.why_unavailable() is None
    assert _why_not_device(torch.device("cuda")) is None


MISSING: dict[str, tuple[Missing, str]] = {
    "torch with CUDA": (
        lambda m: m.setattr(torch.version, "cuda", None),
        "is a build without CUDA; install one with it",
    ),
    "a device": (
        lambda m: m.setattr(torch.cuda, "is_available", lambda: False),
        "check the driver .nvidia-smi. and CUDA_VISIBLE_DEVICES",
    ),
    "the runtime": (
        lambda m: m.setattr(available.cuda, "why_unavailable", lambda: "It is not built."),
        "It is not built",
    ),
    "Triton": (
        lambda m: m.setattr(available, "find_spec", lambda _: None),
        "install the package triton",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_said_before_anything_is_compiled(
    name: str, all_there: pytest.MonkeyPatch
) -> None:
    remove, sentence = MISSING[name]
    remove(all_there)
    with pytest.raises(AssertionError, match=sentence):
        assert not (why := _why_not_device(torch.device("cuda"))), why
    assert "fp16" not in DiscBackend().precisions  # nor is what only GPUs have

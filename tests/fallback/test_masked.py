# SPDX-License-Identifier: Apache-2.0
"""What is compared runs without the one kernel of attention that gives rows without keys other values."""

from collections.abc import Iterator

import pytest
import torch

import blade
from blade.fallback import masked


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_off_inside_and_as_the_user_has_it_after(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "_is_there", lambda leaf: isinstance(leaf, torch.Tensor))
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    with pytest.raises(KeyError), masked.defined_rows({"x": [torch.ones(2)]}):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_on_a_cpu_nothing_changes() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with masked.defined_rows(torch.ones(2)):
        assert torch.backends.cuda.cudnn_sdp_enabled()


SEEN: list[bool] = []


class Looks(torch.nn.Module):
    """Notes whether cuDNN's attention may serve when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(torch.backends.cuda.cudnn_sdp_enabled())
        return x.relu() + 1


def test_references_are_made_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "_is_there", lambda leaf: isinstance(leaf, torch.Tensor))
    torch.backends.cuda.enable_cudnn_sdp(True)
    SEEN.clear()
    blade.optimize(Looks().eval(), torch.ones(2, 3), blade.Config(timing=False))
    # of the tracer's own calls nothing is compared
    assert SEEN.count(False) > SEEN.count(True)
    assert not SEEN[0], "the first reference, of the user's sample"
    assert torch.backends.cuda.cudnn_sdp_enabled()

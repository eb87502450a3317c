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


def test_what_efficient_attention_reads_begins_where_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.randn(2, 3, 12, dtype=torch.float16)
    odd, even = whole[..., 1:9], whole[..., 8:]
    assert masked.aligned(even) is even
    copied = masked.aligned(odd)
    assert torch.equal(copied, odd) and copied.data_ptr() % 16 == 0
    seen: list[int] = []

    def attention(*given: torch.Tensor) -> None:
        seen.extend(one.data_ptr() % 16 for one in given)

    monkeypatch.setattr(masked, "_EFFICIENT", attention)
    masked.Aligned().__torch_dispatch__(attention, (), (odd, even, odd, odd))
    assert seen == [0, 0, 0, odd.data_ptr() % 16]
    with masked.Aligned():
        assert torch.equal(odd + 1, copied + 1)


@pytest.mark.gpu
@pytest.mark.needs("cuda")
def test_a_slice_of_halves_does_not_stop_the_device() -> None:
    """Keys and values of one product, as DeepSeek has them."""
    both = torch.randn(2, 12, 4, 12, dtype=torch.float16, device="cuda").transpose(1, 2)
    query, value = both[..., :8], both[..., 4:]
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.float16, device="cuda")
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad(), masked.defined_rows(both):
        got = attention(query, query, value, mask)
    want = attention(query.cpu().double(), query.cpu().double(), value.cpu().double())
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)

# SPDX-License-Identifier: Apache-2.0
"""What is compared runs without the one kernel of attention that gives rows without keys other values."""

from collections.abc import Iterator

import pytest
import torch

import blade
from blade.capture import equivalence as compare
from blade.capture import references as observe
from blade.verification import attention_semantics as masked
from blade.verification import derived_inputs as derived


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
    with pytest.raises(KeyError), masked.rows_with_keys({"x": [torch.ones(2)]}):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_on_a_cpu_nothing_changes() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with masked.rows_with_keys(torch.ones(2)):
        assert torch.backends.cuda.cudnn_sdp_enabled()


SEEN: list[bool] = []


class Looks(torch.nn.Module):
    """Notes whether cuDNN's attention may serve when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(torch.backends.cuda.cudnn_sdp_enabled())
        return x.relu() + 1


def test_references_are_made_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "_is_there", lambda leaf: isinstance(leaf, torch.Tensor))
    for module in (observe, compare, derived):  # as on a device that a forked process cannot use
        monkeypatch.setattr(module, "can_try", lambda values: False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    SEEN.clear()
    blade.optimize(Looks().eval(), torch.ones(2, 3), blade.Config(timing=False))
    # of the tracer's own calls nothing is compared
    assert SEEN.count(False) > SEEN.count(True)
    assert not SEEN[0], "the first reference, of the user's sample"
    assert torch.backends.cuda.cudnn_sdp_enabled()


EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


def test_what_begins_at_an_odd_place() -> None:
    whole = torch.randn(2, 3, 5, 24, dtype=torch.float16)
    assert masked.is_aligned(whole[..., 8:16])
    assert not masked.is_aligned(whole[..., 4:12])
    assert not masked.is_aligned(whole[..., :20].contiguous()[..., :8])  # its rows do
    assert masked.is_aligned(whole[:, :, :1, :20].contiguous()[0, :1, :, :8])  # there is one row


@pytest.mark.parametrize("is_causal", [True, False])
def test_efficient_attention_of_what_begins_at_an_odd_place_is_made_of_products(
    is_causal: bool,
) -> None:
    x = torch.randn(2, 3, 5, 12, dtype=torch.float16)
    q, k, v = x[..., :8], x[..., 2:10], x[..., 4:]
    bias = None if is_causal else torch.randn(2, 3, 5, 5, dtype=torch.float16)
    args = (q, k, v, bias, False, 0.0, is_causal)
    with masked.AlignedAttentionMode():  # on a CPU the efficient one would raise
        got, *rest = EFFICIENT(*args, scale=0.5)
    wide = (t.double() for t in (q, k, v))
    mask = None if bias is None else bias.double()
    attention = torch.nn.functional.scaled_dot_product_attention
    want = attention(*wide, attn_mask=mask, is_causal=is_causal, scale=0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert [one.dtype for one in rest] == [torch.float32, torch.int64, torch.int64]


def test_efficient_attention_whose_sums_are_asked_for_reads_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = torch.randn(2, 3, 5, 12, dtype=torch.float16)[..., 2:10]
    seen: list[bool] = []

    def efficient(*given: torch.Tensor) -> None:
        seen.extend(masked.is_aligned(one) for one in given[:3])

    monkeypatch.setattr(masked, "_EFFICIENT", efficient)
    masked.AlignedAttentionMode().__torch_dispatch__(efficient, (), (odd, odd, odd, None, True))
    assert seen == [True] * 3
    masked.AlignedAttentionMode().__torch_dispatch__(efficient, (), (odd, odd, odd, None, False))
    assert seen == [True] * 3


@pytest.mark.gpu
@pytest.mark.needs("cuda")
def test_a_slice_of_halves_does_not_stop_the_device() -> None:
    """Keys and values of one product, as DeepSeek has them."""
    both = torch.randn(2, 12, 4, 12, dtype=torch.float16, device="cuda").transpose(1, 2)
    query, value = both[..., :8], both[..., 4:]
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.float16, device="cuda")
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad(), masked.rows_with_keys(both):
        got = attention(query, query, value, mask)
    want = attention(query.cpu().double(), query.cpu().double(), value.cpu().double())
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)

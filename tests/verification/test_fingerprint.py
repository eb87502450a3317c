# SPDX-License-Identifier: Apache-2.0
"""fingerprint: a write to a tensor is found, whatever its dtype and layout."""

import pytest
import torch

from blade.verification.fingerprint import fingerprint, has

RNG = torch.Generator().manual_seed(0)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.mT,
    "a slice": lambda t: t[:, 1:, ::2],
    "one axis": lambda t: t.flatten(),
    "every third": lambda t: t.flatten()[::3],
    "one element": lambda t: t[1, 1, 1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("piece", [1, 1 << 22])
def test_one_element_is_enough(
    dtype: torch.dtype, layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blade.verification.fingerprint._PIECE", piece)
    memory = torch.randint(0, 2, (3, 5, 8), generator=RNG).to(dtype)
    tensor = LAYOUTS[layout](memory)
    before = fingerprint(tensor)
    assert has(tensor, before)
    at = tuple(n - 1 for n in tensor.shape)
    tensor[at] = 1 - int(bool(tensor[at].to(torch.float32) != 0)) if not dtype.is_complex else 2j
    assert not has(tensor, before)


@pytest.mark.parametrize("shape", [(50,), (7, 9)])
def test_elements_that_change_places(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=RNG)
    before, flat = fingerprint(tensor), tensor.view(-1)
    flat[[3, 40]] = flat[[40, 3]]
    assert not has(tensor, before)


def test_nan_and_signs_of_zero_are_bits() -> None:
    tensor = torch.tensor([[torch.nan, 0.0], [torch.inf, 1.0]])
    before = fingerprint(tensor)
    assert has(tensor.clone(), before)
    tensor[0, 1] = -0.0
    assert not has(tensor, before)


def test_views_that_are_conjugated_or_negated() -> None:
    tensor = torch.randn(4, 4, dtype=torch.complex64, generator=RNG)
    for view in (tensor.conj(), tensor.conj().imag):
        before = fingerprint(view)
        assert has(view, before)
        tensor[2, 2] += 1j
        assert not has(view, before)


def test_no_elements() -> None:
    for tensor in (torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, 3)):
        assert has(tensor, fingerprint(tensor))

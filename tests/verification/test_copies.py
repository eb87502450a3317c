# SPDX-License-Identifier: Apache-2.0
"""Copies have the layout of what they are copies of."""

from collections.abc import Callable

import pytest
import torch

from blade.verification.copies import copied

X = torch.arange(480.0).reshape(2, 5, 48)
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: X,
    "permuted": lambda: X.permute(2, 0, 1),
    "channels last": lambda: X.view(2, 5, 6, 8).to(memory_format=torch.channels_last),
    "sliced": lambda: X[:, 1:3, ::2],
    "unaligned": lambda: X.flatten()[3:100],
    "expanded": lambda: X[:, :1].expand(2, 7, 48),
    "an axis of one element": lambda: X.as_strided((2, 1, 48), (240, 7, 1)),
    "conjugated": lambda: torch.view_as_complex(X.view(-1, 2)).conj(),
    "empty": lambda: X[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_strides_stay(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    made = copied(tensor)
    assert made.stride() == tensor.stride() and made.is_conj() == tensor.is_conj()
    assert torch.equal(made, tensor)
    assert made.storage_offset() % 16 == tensor.storage_offset() % 16
    assert not made.numel() or made.data_ptr() != tensor.data_ptr()

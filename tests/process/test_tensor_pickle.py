# SPDX-License-Identifier: Apache-2.0
"""Tensors of dtypes that torch does not pickle arrive as they were."""

import pickle

import pytest
import torch

from blade.process.tensor_pickle import dump

DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex32, torch.float32, torch.bool),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_layout_stay(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    for one in (tensor, tensor.mT, tensor[0, 1], tensor[:0]):
        [made] = pickle.loads(dump([one]))
        assert (made.dtype, made.shape, made.stride()) == (dtype, one.shape, one.stride())
        wide = torch.complex64 if dtype.is_complex else torch.float64
        assert torch.equal(made.to(wide), one.to(wide))

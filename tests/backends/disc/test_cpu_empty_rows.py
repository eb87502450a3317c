# SPDX-License-Identifier: Apache-2.0
"""Kernels whose rows are known to have no elements: nothing is stored, whatever the strides are."""

import pytest
import torch
from cpu_native import Native, symbol

from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Kernel,
    Load,
    Store,
)

pytestmark = pytest.mark.needs("torch_mlir")
F32 = torch.float32


def test_rows_without_elements_store_none() -> None:
    body = (
        Load(Access(0, (0, 1)), F32),
        Compute("neg", (0,), F32),
        Store(Access(1, (1, 0)), 1),
    )
    args = (Arg(F32, False), Arg(F32, True))
    native = Native({"k": Kernel((symbol("s0"),), 0, args, body)})
    for rows in (0, 3):
        out = torch.full((4,), 7.0)
        native.run("k", [torch.randn(4), out], {"s0": rows})
        assert out.tolist() == [7.0] * 4

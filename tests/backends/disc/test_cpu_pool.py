# SPDX-License-Identifier: Apache-2.0
"""The generated maximum pooling against torch: the same bits, at every window and border."""

import pytest
import sympy
import torch
from disc_programs import add_input, compile_to_engine, finish, new_builder
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.frontend.ops.table import OperandSlot
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")
POOL = torch.ops.aten.max_pool2d.default

# channels; kernel, stride (empty: the kernel), padding, ceil_mode
WINDOWS = {
    "ResNet": (64, (3, 3), (2, 2), (1, 1), False),
    "side by side": (150, (2, 2), (), (0, 0), False),
    "beyond the image": (20, (3, 3), (2, 2), (0, 0), True),
    "long": (7, (5, 7), (1, 1), (2, 3), False),
}


def engine_of(
    dilation: int, target: CpuTarget | None = None, dtype: torch.dtype = torch.float32
) -> Engine:
    """All windows side by side: images [n, h, w, c] each -> maxima."""
    b, results = new_builder(), []
    for k, (channels, kernel, stride, padding, ceil) in enumerate(WINDOWS.values()):
        n, *sizes = (sympy.Symbol(f"{s}{k}", integer=True, nonnegative=True) for s in "nhw")
        out = []
        for size, extent, step, pad in zip(sizes, kernel, stride or kernel, padding, strict=True):
            free = size + 2 * pad - dilation * (extent - 1) - 1
            out.append(FloorDiv(free + (step - 1) * ceil, step) + 1)
        template = (OperandSlot(0), kernel, stride, padding, (dilation, dilation), ceil)
        x = add_input(b, (n, *sizes, channels), dtype)
        results.append(
            b.make(
                "spatial",
                [x],
                (n, *out, channels),
                dtype,
                target=POOL,
                template=template,
            )
        )
    return compile_to_engine(finish(b, *results), target)


def check(
    engine: Engine,
    dilation: int,
    size: int,
    images: int,
    with_nan: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    shapes = [(images, size, size + 1, c) for c, *_ in WINDOWS.values()]
    inputs = [(torch.randn(shape) - 3).to(dtype) for shape in shapes]
    for x in inputs:
        if with_nan:
            x.view(-1)[:: x.numel() // 5] = float("nan")
            x.view(-1)[1 :: x.numel() // 3] = -float("inf")
    found = engine.try_execute(inputs) or pytest.fail(engine.last_error())
    for x, y, (_, kernel, stride, padding, ceil) in zip(
        inputs, found, WINDOWS.values(), strict=True
    ):
        want = torch.max_pool2d(x.movedim(-1, 1), kernel, stride, padding, dilation, ceil)
        torch.testing.assert_close(y, want.movedim(1, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_values(lanes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(lanes)
    engine = engine_of(1, CpuTarget(host().isa, lanes), dtype)
    assert "aten::max_pool2d" not in engine.program()
    for size, images in ((5, 1), (6, 3), (9, 0), (15, 2), (40, 1)):
        check(engine, 1, size, images, dtype=dtype)


def test_nan_is_the_maximum() -> None:
    torch.manual_seed(1)
    check(engine_of(1), 1, 12, 2, with_nan=True)
    narrow = engine_of(1, dtype=torch.bfloat16)
    check(narrow, 1, 12, 2, with_nan=True, dtype=torch.bfloat16)


def test_windows_with_gaps_are_asked_of_torch() -> None:
    torch.manual_seed(2)
    engine = engine_of(2)
    assert engine.program().count("aten::max_pool2d") == len(WINDOWS)
    check(engine, 2, 14, 2)

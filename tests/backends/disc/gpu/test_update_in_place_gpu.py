# SPDX-License-Identifier: Apache-2.0
"""Parts of an input that a program for a GPU writes where they lie: regions, and what an index selects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_trace import trace
from run_program import compile_to_program

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")
aten = torch.ops.aten


def region(cache: Any, at: Any, new: Any) -> Any:
    """One row of each."""
    whole = aten.slice_scatter(cache, new * 2, 2, 3, 5)
    return whole[:, :, :5].sum(-1), whole


def copied(cache: Any, at: Any, new: Any) -> Any:
    whole = aten.index_copy(cache, 2, at, new * 2)
    return (whole * 3).sum(2), whole


def put(cache: Any, at: Any, new: Any) -> Any:
    """From the end, too, and one row for all heads."""
    whole = aten.index_put(cache, [None, None, at - 7], new[:, :1] + 1)
    return whole.exp(), whole


def put_first(cache: Any, at: Any, new: Any) -> Any:
    whole = aten.index_put(cache, [at - 2], new.sum())
    return whole[0], whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("fn", [region, copied, put, put_first])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts(fn: Callable[[Any, Any, Any], Any], dtype: torch.dtype, dynamic: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    cache = torch.randint(-9, 9, (2, 3, 7, 20), generator=rng).to(dtype)
    new = torch.randint(-9, 9, (2, 3, 2, 20), generator=rng).to(dtype)
    if fn is put and dtype is torch.int64:
        pytest.skip("the exponential of an integer is a float32")
    given = [cache, torch.tensor([2, 1]), new]
    varies = [[dynamic and k == 2 for k in range(4)], *([False] * t.dim() for t in given[1:])]
    gm, shape_env = trace(fn, given, varies)
    program = compile_to_program(lower(gm, shape_env, updates=[0], forms=FORMS))
    assert "update 0 again" in program.text and "call aten::" not in program.text, program.text
    want, whole = fn(*given)
    [got] = program(*given)
    torch.testing.assert_close(got, want)
    assert torch.equal(cache, whole)


def test_a_deterministic_write_is_atens() -> None:
    cache, new = torch.zeros(2, 3, 7, 20), torch.ones(2, 3, 2, 20)
    given = [cache, torch.tensor([2, 1]), new]
    gm, shape_env = trace(copied, given, [[False] * t.dim() for t in given])
    torch.use_deterministic_algorithms(True)
    try:
        program = compile_to_program(lower(gm, shape_env, updates=[0], forms=FORMS))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "again" not in program.text and "call aten::index_copy" in program.text

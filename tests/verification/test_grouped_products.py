# SPDX-License-Identifier: Apache-2.0
"""Grouped products in float64 against torch's in float32, and the references that need them."""

import pytest
import torch
from torch.nn import functional as F

from blade.verification.fp64_reference import Fp64Reference
from blade.verification.grouped_products import GROUPED, GroupedProducts, grouped_product

ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)  # an empty group, too
SHAPES = {
    "rows": ((10, 16), (3, 16, 32)),
    "depth": ((16, 10), (10, 32)),
    "columns": ((3, 16, 32), (32, 10)),
    "batches": ((3, 16, 32), (3, 32, 8)),
}


def _operands(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a, b = (torch.randn(shape, dtype=torch.float32) for shape in SHAPES[kind])
    return a.to(dtype), b.to(dtype), *(() if kind == "batches" else (ENDS,))


@pytest.mark.parametrize("kind", SHAPES)
def test_groups_along_each_axis(kind: str) -> None:
    a, b, *ends = _operands(kind, torch.float64)
    got = grouped_product(a, b, *ends)
    parts = [slice(0, 3), slice(3, 3), slice(3, 10)]
    if kind == "rows":
        want = torch.cat([a[part] @ b[k] for k, part in enumerate(parts)])
    elif kind == "depth":
        want = torch.stack([a[:, part] @ b[part] for part in parts])
    elif kind == "columns":
        want = torch.cat([a[k] @ b[:, part] for k, part in enumerate(parts)], 1)
    else:
        want = a @ b
    assert got.dtype == torch.float64 and torch.equal(got, want)


def test_it_is_torchs_product() -> None:
    a, b, ends = _operands("rows", torch.bfloat16)
    got = F.grouped_mm(a, b, offs=ends)
    want = grouped_product(a.double(), b.double(), ends)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=5e-2)


def test_models_in_float64_have_them_under_the_mode() -> None:
    a, b, ends = _operands("rows", torch.float64)
    with pytest.raises(RuntimeError, match="Double"):
        F.grouped_mm(a, b, offs=ends)
    with GroupedProducts():
        got = F.grouped_mm(a, b, offs=ends)
    assert torch.equal(got, grouped_product(a, b, ends))


def test_the_reference_of_a_cluster_has_them() -> None:
    a, b, ends = _operands("rows", torch.bfloat16)
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in "abc"]
    graph.output((graph.call_function(GROUPED, tuple(given)),))
    [got] = Fp64Reference(torch.fx.GraphModule(torch.nn.Module(), graph))((a, b, ends))
    assert torch.equal(got, grouped_product(a.double(), b.double(), ends))

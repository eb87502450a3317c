# SPDX-License-Identifier: Apache-2.0
"""torch.compile(backend="disc") of functions whose sizes depend on elements: one graph, one engine."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blade.dynamo.live_graphs import reports

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    """Dynamo breaks the graph at such ops unless it is told not to."""
    torch._dynamo.reset()
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()


def selected(x: torch.Tensor) -> Any:
    y = x * 2 + 1
    z = y[y > 0].exp() * 3
    return z.sum() / z.shape[0], z


def narrowed(x: torch.Tensor) -> Any:
    n = (x > 0).sum().item() // x.shape[1]
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return x[:n].exp() + 1


@pytest.mark.parametrize("function", [selected, narrowed])
def test_one_engine_for_all_of_it(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="disc", dynamic=True, fullgraph=True)
    with torch.no_grad():
        for x in (torch.randn(6, 4), torch.randn(5, 4), torch.ones(3, 4), -torch.ones(3, 4)):
            torch.testing.assert_close(compiled(x), function(x), equal_nan=True)
    report = reports()[-1]
    assert [c.backend for c in report.clusters] == ["disc"]
    assert set(report.outside) <= {"aten::_assert_scalar"}

# SPDX-License-Identifier: Apache-2.0
"""What an engine returns lies in memory as torch's results do: strides, and which of them share memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_trace import trace

from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

WEIGHT = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


def heads(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x, WEIGHT)
    return y.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2)


def cached(x: torch.Tensor) -> Any:
    """A cache's first step: what is concatenated with nothing is a copy in another order."""
    kept = torch.cat([heads(x)], -2)
    return kept, kept[:, :, None], kept.unsqueeze(0), x + 1


def two(x: torch.Tensor) -> Any:
    one, other = torch.cat([heads(x)], -2), torch.cat([heads(x)], -2)
    return one, other, other[..., None]


def packed(x: torch.Tensor) -> Any:
    """Keys and values side by side, as one product makes them, copied apart: two parts of one copy."""
    joint = torch.nn.functional.linear(x, WEIGHT).unflatten(-1, (2, 6))
    apart = joint.permute(2, 0, 1, 3).contiguous()
    return apart[0], apart[1], apart[0].transpose(0, 1)


@pytest.mark.parametrize("function", [cached, two])
def test_results_that_share_memory_are_in_torchs_order(function: Callable[..., Any]) -> None:
    for got, want in _answers(function):
        assert _shares(got) == _shares(want)


def test_parts_of_a_copy_that_is_not_made_have_its_strides() -> None:
    assert len(_answers(packed)) == 2


def _answers(function: Callable[..., Any]) -> list[tuple[Any, Any]]:
    """The engine's and torch's at two shapes: values and strides are compared."""
    sample = torch.randn(2, 5, 8)
    gm, shape_env = trace(function, [sample], [(True, True, False)])
    compiled = compile_graph(gm, shape_env, host())
    engine: Any = make_engine(
        "shared", "disc", compiled.program, compiled.object, list(compiled.constants), {}
    )
    answers = []
    for shape in ((2, 5, 8), (3, 7, 8)):
        x = torch.randn(shape)
        got, want = engine.try_execute([x]), function(x)
        assert got is not None, engine.last_error()
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
            assert g.stride() == w.stride()
        answers.append((got, want))
    return answers


def _shares(tensors: Any) -> list[list[bool]]:
    keys = [t.untyped_storage().data_ptr() for t in tensors]
    return [[a == b for b in keys] for a in keys]

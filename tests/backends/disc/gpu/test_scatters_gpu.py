# SPDX-License-Identifier: Apache-2.0
"""Scattered sums and extrema as programs for a GPU, interpreted, against eager torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_trace import trace
from run_program import GpuProgram, compile_to_program

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")


def _ints(rng: torch.Generator, below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=rng)


def _floats(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng)


def _messages(rng: torch.Generator, nodes: int, edges: int) -> list[torch.Tensor]:
    """Features, sources, targets and weights of a graph."""
    graph = [_ints(rng, nodes, edges), _ints(rng, nodes, edges)]
    return [_floats(rng, nodes, 20), *graph, _floats(rng, edges)]


def _convolution(x: Any, source: Any, target: Any, weight: Any) -> Any:
    sent = x[source] * weight.sigmoid().unsqueeze(1)
    return torch.zeros_like(x).index_add(0, target, sent) + x


def _degrees(x: Any, source: Any, target: Any, weight: Any) -> Any:
    ones = torch.ones_like(target, dtype=x.dtype)
    return torch.zeros(x.shape[0]).index_add(0, target, ones).add(1).rsqrt()


def _softmax_of_edges(x: Any, source: Any, target: Any, weight: Any) -> Any:
    low = torch.full((x.shape[0],), -1e4)
    most = low.scatter_reduce(0, target, weight, "amax")
    power = torch.exp(weight - most[target])
    total = torch.zeros_like(low).index_add(0, target, power)
    return power / total[target]


def _smallest(x: Any, source: Any, target: Any, weight: Any) -> Any:
    return x.scatter_reduce(0, target.unsqueeze(1).expand(-1, x.shape[1]), x[source], "amin")


def _along_columns(x: Any, source: Any, target: Any, weight: Any) -> Any:
    return x.index_add(1, source % x.shape[1], weight.tanh().expand(x.shape[0], -1), alpha=-2)


def _halves(x: Any, source: Any, target: Any, weight: Any) -> Any:
    """Of numbers that bfloat16 adds without rounding."""
    half = (x * 4).round().clamp(-8, 8).bfloat16()
    return torch.zeros_like(half).index_add(0, target, half[source] * 0.5)


def _put(x: Any, source: Any, target: Any, weight: Any) -> Any:
    from_the_end = torch.where(target % 2 == 0, target, target - x.shape[0])
    return torch.index_put(x, (from_the_end,), x[source] * weight[:, None], accumulate=True)


def _put_at_pixels(x: Any, source: Any, target: Any, weight: Any) -> Any:
    """Of two indices, one of which counts from the end."""
    images = torch.zeros(2, x.shape[0], 4, 3)
    sent = weight.tanh()[None, :, None].expand(2, -1, 3)
    return torch.ops.aten.index_put(images, [None, target % x.shape[0], target % 4 - 4], sent, True)


def _two_dimensions(x: Any, source: Any, target: Any, weight: Any) -> Any:
    places = torch.arange(x.shape[0])[:, None] * 3 + source
    return x.scatter_add(1, places % x.shape[1], weight.tanh().expand(x.shape[0] + 1, -1))


def _embedding(padding: int) -> Callable[..., Any]:
    def gradient(x: Any, source: Any, target: Any, weight: Any) -> Any:
        sent = x[source].unflatten(0, (-1, 1)).tanh()
        return torch.ops.aten.embedding_dense_backward(
            sent, target[:, None], x.shape[0], padding, False
        )

    return gradient


CASES = {
    "convolution": _convolution,
    "degrees": _degrees,
    "softmax of edges": _softmax_of_edges,
    "smallest": _smallest,
    "along columns": _along_columns,
    "halves": _halves,
    "put": _put,
    "put at pixels": _put_at_pixels,
    "two dimensions": _two_dimensions,
    "embedding": _embedding(-1),
    "embedding with padding": _embedding(1),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], GpuProgram]:
    function = CASES[request.param]
    sample = _messages(torch.Generator().manual_seed(0), 9, 30)
    gm, shape_env = trace(function, sample, [(True, False), (True,), (True,), (True,)])
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert "atomic" in "".join(unit.text for unit in program.units.values())
    return function, program


@pytest.mark.parametrize("nodes, edges", [(9, 30), (50, 7), (3, 200), (1, 1)])
def test_points_that_share_an_element_are_combined(
    case: tuple[Callable[..., Any], GpuProgram], nodes: int, edges: int
) -> None:
    function, program = case
    inputs = _messages(torch.Generator().manual_seed(nodes), nodes, edges)
    [got] = program(*inputs)
    torch.testing.assert_close(got, function(*inputs))


@pytest.mark.parametrize("name", ["softmax of edges", "smallest"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_the_largest_and_the_smallest(name: str, sign: float) -> None:
    function, inputs = CASES[name], _messages(torch.Generator().manual_seed(3), 9, 30)
    inputs[0][2, 3] = inputs[3][7] = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    gm, shape_env = trace(function, inputs, [(True, False), (True,), (True,), (True,)])
    [got] = compile_to_program(lower(gm, shape_env, forms=FORMS))(*inputs)
    want = function(*inputs)
    assert want.isnan().any() and not want.isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_atens_where_the_order_of_additions_has_to_be_fixed() -> None:
    inputs = _messages(torch.Generator().manual_seed(3), 9, 30)
    gm, shape_env = trace(_convolution, inputs, [(True, False), (True,), (True,), (True,)])
    torch.use_deterministic_algorithms(True)
    try:
        program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "aten::index_add" in program.text and "atomic" not in str(program.units)
    torch.testing.assert_close(program(*inputs), [_convolution(*inputs)])


def test_rows_and_what_goes_elsewhere_are_two_kernels() -> None:
    """A softmax of the rows that are scattered, weighed by another one: reductions are in kernels of rows."""

    def function(x: Any, source: Any, target: Any, weight: Any) -> Any:
        sent = x[source].softmax(-1) * (x[target] * weight[:, None]).softmax(-1)
        return torch.zeros_like(x).index_add(0, target, sent)

    inputs = _messages(torch.Generator().manual_seed(3), 9, 30)
    gm, shape_env = trace(function, inputs, [(True, False), (True,), (True,), (True,)])
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    torch.testing.assert_close(program(*inputs), [function(*inputs)])
    atomic = [name for name, unit in program.units.items() if "atomic_add" in unit.text]
    assert atomic and all(name.startswith("loop") for name in atomic)

# SPDX-License-Identifier: Apache-2.0
"""Layout propagation: what is copied between convolutions (nothing), and the values, against float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.graph import Graph, Value
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.passes.legalize import addressable, rows
from blade.backends.disc.passes.materialize_outputs import materialize_outputs
from blade.backends.disc.passes.propagate_layouts import propagate
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
IMAGE = ([True, False, True, True],)


def weights(*shape: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng) / shape[-1]


def copies(graph: Graph) -> list[Value]:
    """The values that are only copies, once everything that needs an order has one."""
    graph = materialize_outputs(addressable(rows(propagate(graph))))
    return [v for v in graph.values if v.op == "cast" and v.args[0].dtype == v.dtype]


def lowered(
    function: Callable[..., object],
    samples: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[bool]],
) -> Graph:
    return lower(*trace(function, samples, dynamic))


def check(
    function: Callable[..., object],
    dynamic: Sequence[Sequence[bool]],
    *runs: Sequence[torch.Tensor],
) -> Graph:
    """Compile from the first run, answer all of them; the lowered graph."""
    graph = lowered(function, runs[0], dynamic)
    compiled = compile_ir(graph, host())
    engine = make_engine("t", "disc", compiled.program, compiled.object, compiled.constants, {})
    for run in runs:
        got = engine.try_execute(list(run))
        assert got is not None, engine.last_error()
        want = function(*run)
        for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert one.stride() == other.stride() or 1 in one.shape
        for one, other in zip(got, interpret(propagate(graph), run), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return graph


def images(channels: int) -> list[list[torch.Tensor]]:
    sizes = ((2, 9, 11), (1, 8, 8), (3, 16, 5), (0, 8, 8))
    return [[torch.randn(b, channels, h, w)] for b, h, w in sizes]


W3, W3B, W1 = weights(8, 4, 3, 3), weights(8, 8, 3, 3), weights(8, 8, 1, 1)
W2 = weights(8, 16, 1, 1)
DEPTH, SCALE, SHIFT = weights(8, 1, 3, 3), weights(8), weights(8) + 1


def residual_block(x: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(x, W3, padding=1).relu()
    y = F.conv2d(x, W3B, SHIFT, padding=1) * SCALE[:, None, None] + SHIFT[None, :, None, None]
    return F.conv2d(F.relu(x + y), W1)


def squeeze_excite(x: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(F.conv2d(x, W3, padding=1), DEPTH, padding=1, groups=8)
    gate = F.conv2d(F.silu(F.conv2d(x.mean((2, 3), keepdim=True), W1)), W1, SHIFT)
    return F.conv2d(x * torch.sigmoid(gate), W1)


def dense_block(x: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(x, W3, padding=1)
    x = torch.cat([x[:, :4], F.conv2d(x, W1)[:, 4:].relu()], 1)
    return F.conv2d(F.pad(x[:, :, 1:], (1, 1, 0, 1)), W1)


def patches_to_tokens(x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.conv2d(x, W3, stride=3).flatten(2).transpose(1, 2), W1[:, :, 0, 0])


def channels_first_norm(x: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(x, W3, padding=1)
    x = x.permute(0, 2, 3, 1)
    x = F.linear(F.layer_norm(x, (8,), SCALE, SHIFT), W1[:, :, 0, 0], SHIFT)
    return F.conv2d(F.gelu(x).permute(0, 3, 1, 2), W1)


def tokens_between(x: torch.Tensor) -> torch.Tensor:
    """What a diffusion model does around its attention."""
    x = F.conv2d(x, W3, padding=1)
    batch, channels, height, width = x.shape
    y = F.linear(x.permute(0, 2, 3, 1).reshape(batch, height * width, channels), W1[:, :, 0, 0])
    y = y.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
    return F.conv2d(x + y, W1)


@pytest.mark.parametrize(
    "function",
    [
        residual_block,
        squeeze_excite,
        dense_block,
        patches_to_tokens,
        channels_first_norm,
        tokens_between,
    ],
)
def test_nothing_is_copied_between_convolutions(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    runs = images(4)
    if function is patches_to_tokens:  # linear of nothing is torch's
        runs.pop()
    graph = check(function, IMAGE, *runs)
    # the input, of which the caller chose the order, and the result, of which the caller expects one
    ends = 1 + (function is not patches_to_tokens)
    found = copies(graph)
    assert len([v for v in found if view_of(v.args[0]) is not None]) <= ends, found
    convolutions = [v for v in propagate(graph).values if v.op == "conv"]
    assert all(c.args[0].op != "permute" for c in convolutions[1:]), propagate(graph)


def test_normalization_of_the_input_writes_in_the_order_of_the_convolution() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d((x - 0.5) * 2 + 1, W3)

    assert len(copies(check(function, IMAGE, *images(4)))) == 1  # the result


def test_the_last_op_writes_in_the_order_of_the_result() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(F.conv2d(x, W3))

    assert len(copies(check(function, IMAGE, *images(4)))) == 1  # the input


def test_a_value_read_in_two_orders_is_written_once_and_copied_once() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.conv2d(x, W3).relu()
        return y, F.conv2d(y, W1)

    assert len(copies(check(function, IMAGE, *images(4)))) == 3  # the input and two results


def test_what_merges_axes_that_lie_apart_is_copied_in_the_order_of_its_reader() -> None:
    """The pixels of a super-resolution network: from channels of one convolution to images of the next."""
    first, last = weights(12, 4, 3, 3), weights(5, 3, 3, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.pixel_shuffle(F.conv2d(x, first, padding=1), 2)
        return F.conv2d(torch.relu(y), last, padding=1).relu()

    x, other = torch.randn(2, 4, 5, 6), torch.randn(1, 4, 3, 2)
    graph = check(f, IMAGE, [x], [other])
    batch, _, height, width = (d for d in graph.inputs[0].shape)
    found = [v.shape for v in copies(graph)]  # of the input, too
    assert found == [(batch, height, width, 4), (batch, height, 2, width, 2, 3)]


def test_one_dimension() -> None:
    weight, again = weights(8, 4, 3), weights(8, 8, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(F.conv1d(x, weight, SHIFT, padding=1))
        x = F.gelu(F.conv1d(x, again, SHIFT, stride=2, padding=1)).transpose(1, 2)
        return F.layer_norm(x, (8,), SCALE, SHIFT)

    graph = check(
        function, ([True, False, True],), *[[torch.randn(b, 4, s)] for b, s in ((2, 9), (1, 8))]
    )
    assert len(copies(graph)) == 1  # the input


@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_of_a_result_has_the_strides_of_its_whole(parts: int) -> None:
    weight = weights(8, 4, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.conv1d(x, weight, SHIFT, padding=1).relu()
        return tuple(x[:, 2 + k :] for k in range(parts))

    check(function, ([True, False, True],), *[[torch.randn(b, 4, s)] for b, s in ((2, 9), (3, 7))])


def test_attention_heads_are_not_reordered_twice() -> None:
    """Without convolutions: a scaled query is still written in the order that the product reads."""

    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q = F.linear(q, W1[:, :, 0, 0]).view(*q.shape[:2], 2, 4).transpose(1, 2) * 0.5
        return q @ k

    runs = [[torch.randn(b, n, 8), torch.randn(b, 2, 4, n)] for b, n in ((2, 5), (1, 3))]
    dynamic = ([True, True, False], [True, False, False, True])
    assert copies(check(function, dynamic, *runs)) == []


def permuted(perms: Sequence[Sequence[int] | None]) -> Graph:
    """x + y + z, each permuted to one shape."""
    b = new_builder()
    total: Value | None = None
    for perm in perms:
        shape = (S0, S1, S2)
        if perm is not None:
            shape = tuple(shape[list(perm).index(k)] for k in range(3))  # type: ignore[assignment]
        x = b.pointwise("exp", add_input(b, shape))
        x = x if perm is None else b.permute(x, perm)
        total = x if total is None else b.pointwise("add", total, x)
    assert total is not None
    return finish(b, total)


@pytest.mark.parametrize(
    "perms",
    [
        ((0, 2, 1), (0, 2, 1), (0, 2, 1)),
        ((1, 2, 0), (1, 2, 0), None),
        (None, (2, 1, 0), (1, 0, 2)),
        ((2, 0, 1), (1, 2, 0), None),
    ],
)
def test_operands_in_different_orders(perms: Sequence[Sequence[int] | None]) -> None:
    torch.manual_seed(0)
    graph = permuted(perms)
    engine = compile_to_engine(graph)
    sizes = (3, 4, 5)
    tensors = [
        torch.rand([sizes[k] for k in range(3)])
        if p is None
        else torch.rand([sizes[list(p).index(k)] for k in range(3)])
        for p in perms
    ]
    exact = [t.double().exp() for t in tensors]
    want = sum(t if p is None else t.permute(*p) for t, p in zip(exact, perms, strict=True))
    got = engine.try_execute(tensors)
    assert got is not None, engine.last_error()
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)


def stem(x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(F.conv2d(x, W3, padding=1).relu(), 3, 2, 1)
    x = F.avg_pool2d(F.conv2d(x, W3B, padding=1), 2)
    return F.adaptive_avg_pool2d(F.conv2d(x, W1), 1).flatten(1)


def up_and_down(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A diffusion model's blocks: group norm, activation, convolution; skip connections; upsampling."""
    x = F.conv2d(x, W3, padding=1)
    y = F.conv2d(F.silu(F.group_norm(x, 2, SCALE, SHIFT)), W3B, padding=1, stride=2)
    y = F.interpolate(F.conv2d(y, W1), scale_factor=2.0)
    z = F.interpolate(y, scale_factor=1.5, mode="bilinear")
    return F.conv2d(torch.cat([y, F.avg_pool2d(x, 1)], 1), W2), F.conv2d(z, W1)


@pytest.mark.parametrize("function", [stem, up_and_down])
def test_pooling_norms_and_resampling_keep_the_order(
    function: Callable[[torch.Tensor], object],
) -> None:
    runs = [[torch.randn(b, 4, h, w)] for b, h, w in ((2, 8, 12), (1, 16, 10), (3, 6, 8))]
    graph = propagate(check(function, IMAGE, *runs))
    assert not [v for v in graph.values if v.op == "call"], graph
    moved = [v for v in graph.values if v.op == "permute" and v not in graph.outputs]
    assert [v.args[0].op for v in moved] == ["input"], graph

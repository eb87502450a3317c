# SPDX-License-Identifier: Apache-2.0
"""`conv` of the IR: every number of spatial axes, operands and attributes, against float64."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder
from op_trace import trace
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.convolution import to_channels_first
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]


def graph_of(
    spatial: int, groups: int, stride: int, dilation: int, relu: bool, parts: Sequence[str]
) -> Graph:
    """One `conv` with 6 channels in and 4 out over [S0, S1, .., 6], padded by 1, kernel 3."""
    b = new_builder()
    x = add_input(b, (S0, *[S1] * spatial, 6))
    weight = torch.randn(4, 6 // groups, *[3] * spatial)
    constants = [weight]
    operands = [x, b.make("const", (), weight.shape, weight.dtype, weight.stride(), index=0)]
    if "bias" in parts:
        constants.append(torch.randn(4))
        operands.append(b.make("const", (), (4,), torch.float32, (1,), index=1))
    size = FloorDiv(S1 + 2 - dilation * 2 - 1, stride) + 1
    shape = (S0, *[size] * spatial, 4)
    if "residual" in parts:
        operands.append(add_input(b, shape))
    y = b.make(
        "conv",
        operands,
        shape,
        torch.float32,
        stride=(stride,) * spatial,
        padding=(1,) * spatial,
        dilation=(dilation,) * spatial,
        groups=groups,
        activation="relu" if relu else None,
        transposed=False,
    )
    return finish(b, y, constants=constants)


def want(
    graph: Graph, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    (conv,) = (v for v in graph.values if v.op == "conv")
    a, rank = conv.attrs, len(conv.shape)
    constants = [c.to(dtype) for c in graph.constants]
    x, *residual = (t.to(dtype) for t in tensors)
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[rank]
    x = x.permute(to_channels_first(rank))
    bias = constants[1] if len(constants) > 1 else None
    y = function(x, constants[0], bias, a["stride"], a["padding"], a["dilation"], a["groups"])
    y = y.movedim(1, -1)
    y = y + residual[0] if residual else y
    return y.relu() if a["activation"] == "relu" else y


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "stride", "dilation", "relu", "parts"),
    [
        (1, 1, 1, False, ()),
        (2, 2, 1, True, ("bias",)),
        (1, 1, 2, False, ("bias", "residual")),
        (2, 2, 2, True, ("residual",)),
    ],
)
def test_values(
    spatial: int, groups: int, stride: int, dilation: int, relu: bool, parts: Sequence[str]
) -> None:
    torch.manual_seed(0)
    graph = graph_of(spatial, groups, stride, dilation, relu, parts)
    engine = compile_to_engine(graph)
    for batch, size in ((2, 7), (1, 4), (3, 12), (0, 5), (1, 2 * dilation - 1)):
        x = torch.randn(batch, *[size] * spatial, 6)
        out = (size + 2 - 2 * dilation - 1) // stride + 1
        tensors = [x, torch.randn(batch, *[out] * spatial, 4)][: 1 + ("residual" in parts)]
        got = engine.try_execute(tensors)
        assert got is not None, engine.last_error()
        ideal, rounded = want(graph, tensors), want(graph, tensors, torch.float32)
        assert got[0].is_contiguous()
        torch.testing.assert_close(got[0].double(), ideal, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(interpret(graph, tensors)[0], rounded, rtol=1e-5, atol=1e-5)


def compiled(
    function: object, sample: torch.Tensor, dynamic: Sequence[bool]
) -> tuple[Graph, Engine]:
    gm, shape_env = trace(function, [sample], [dynamic])  # type: ignore[arg-type]
    graph = lower(gm, shape_env)
    made = compile_ir(graph, host())
    return graph, make_engine("t", "disc", made.program, made.object, list(made.constants), {})


def test_a_kernel_larger_than_its_input_is_left_to_torch() -> None:
    weight = torch.randn(4, 3, 5, 5)
    _, engine = compiled(
        lambda x: F.conv2d(x, weight, padding=1), torch.randn(2, 3, 8, 8), [True, False, True, True]
    )
    assert engine.try_execute([torch.randn(2, 3, 3, 8)]) is not None
    assert engine.try_execute([torch.randn(2, 3, 2, 8)]) is None


def test_one_engine_for_every_batch() -> None:
    """torch picks another library from 16 images on; that is no reason for a guard."""
    weight = torch.randn(4, 3, 3, 3)
    graph, engine = compiled(
        lambda x: F.conv2d(x, weight), torch.randn(2, 3, 8, 8), [True, False, True, True]
    )
    assert not any("16" in str(f.relation) for f in graph.facts)
    x = torch.randn(20, 3, 9, 9)
    got = engine.try_execute([x])
    assert got is not None
    torch.testing.assert_close(got[0], F.conv2d(x, weight), rtol=1e-5, atol=1e-5)


def test_results_are_laid_out_as_torch_lays_them_out() -> None:
    weight = torch.randn(4, 3, 3, 3)
    _, engine = compiled(
        lambda x: F.conv2d(x, weight), torch.randn(2, 3, 8, 8), [True, False, True, True]
    )
    got = engine.try_execute([torch.randn(2, 3, 9, 7)])
    assert got is not None and got[0].is_contiguous()


def test_one_image_without_a_batch() -> None:
    weight = torch.randn(4, 3, 3, 3)
    _, engine = compiled(lambda x: F.conv2d(x, weight), torch.randn(3, 8, 8), [False, True, True])
    x = torch.randn(3, 9, 5)
    got = engine.try_execute([x])
    assert got is not None
    torch.testing.assert_close(got[0], F.conv2d(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_padding_by_name(kernel: int) -> None:
    weight = torch.randn(4, 3, kernel)
    _, engine = compiled(
        lambda x: (F.conv1d(x, weight, padding="same"), F.conv1d(x, weight, padding="valid")),
        torch.randn(2, 3, 8),
        [True, False, True],
    )
    x = torch.randn(1, 3, 11)
    got = engine.try_execute([x])
    assert got is not None
    for name, one in zip(("same", "valid"), got, strict=True):
        torch.testing.assert_close(one, F.conv1d(x, weight, padding=name), rtol=1e-5, atol=1e-5)

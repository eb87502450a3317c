# SPDX-License-Identifier: Apache-2.0
"""Generated products for GPUs with what follows them: values in Triton's interpreter, against float64."""

import math

import pytest
import torch
from cpu_native import symbol
from library_launches import run

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, fuse
from blade.backends.disc.gpu.gemm.epilogue import group_epilogue, plain_epilogue
from blade.backends.disc.gpu.gemm.product import (
    GemmProduct,
    GemmTile,
    launch,
    product_of,
)
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    contiguous_strides,
)
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.passes.legalize import addressable
from blade.backends.disc.program.instructions import Counters

pytestmark = pytest.mark.needs("triton_interpreter")

B, S = symbol("s0"), symbol("s1")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TILES = (GemmTile(16, 32, 16), GemmTile(32, 16, 32, split=3), GemmTile(16, 16, 16, split=2))


def compute(
    product: GemmProduct, tile: GemmTile, tensors: dict[int, torch.Tensor], sizes: dict[str, int]
) -> None:
    run([launch(product, tile, None, Counters(64), SizeRelations())], tensors, sizes)


def fused_with(
    b: IrBuilder, outputs: list[Value], inputs: list[Value]
) -> tuple[Fused, FusionGroup]:
    strides = tuple(contiguous_strides(v.shape) for v in outputs)
    fused = fuse(Graph(b.values, tuple(outputs), strides, tuple(inputs)))
    (group,) = [u for u in fused.units if isinstance(u, FusionGroup)]
    return fused, group


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(
        got.double(), want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype]
    )


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 9), (0, 3)])
def test_product_with_bias(tile: GemmTile, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    b, depth, columns = IrBuilder(), 40, 24
    x = b.make("input", (), (B, S, depth), dtype, index=0)
    w = b.make("const", (), (columns, depth), dtype, index=0)
    bias = b.make("const", (), (columns,), dtype, index=1)
    y = b.make("linear", (x, w, bias), (B, S, columns), dtype)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    given = [torch.randn(s, dtype=dtype) for s in ((*sizes, depth), (columns, depth), (columns,))]
    got = torch.full((*sizes, columns), math.inf, dtype=dtype)
    tensors = dict(zip((x.id, w.id, bias.id, y.id), (*given, got), strict=True))
    compute(product, tile, tensors, {"s0": sizes[0], "s1": sizes[1]})
    close(got, torch.nn.functional.linear(*(t.double() for t in given)))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_operands_are_read_where_they_lie(tile: GemmTile) -> None:
    """A slice of wider rows times a transposed slice, as merged and GPT-2's products are."""
    torch.manual_seed(1)
    b = IrBuilder()
    wide = b.make("input", (), (B, S, 96), torch.float32, index=0)
    x = b.slice(wide, 2, 32, 1, 48)
    stored = b.make("const", (), (48, 80), torch.float32, index=0)
    w = b.permute(b.slice(stored, 1, 16, 1, 64), (1, 0))
    y = b.make("linear", (x, w), (B, S, 64), torch.float32)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    given, weight = torch.randn(3, 7, 96), torch.randn(48, 80)
    got = torch.full((3, 7, 64), math.inf)
    compute(product, tile, {wide.id: given, stored.id: weight, y.id: got}, {"s0": 3, "s1": 7})
    close(got, given[..., 32:80].double() @ weight[:, 16:80].double())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_matrix_is_read_where_it_lies(tile: GemmTile, dtype: torch.dtype) -> None:
    """The gradient of a weight: columns of the gradient times rows, in an odd number."""
    torch.manual_seed(1)
    b = IrBuilder()
    gradient = b.make("input", (), (37, 40), dtype, index=0)
    rows = b.make("input", (), (37, 24), dtype, index=1)
    y = b.make("linear", (b.permute(gradient, (1, 0)), b.permute(rows, (1, 0))), (40, 24), dtype)
    product = product_of(y, plain_epilogue(y))
    assert product is not None and product.step == 40
    given = [torch.randn(37, 40).to(dtype), torch.randn(37, 24).to(dtype)]
    got = torch.full((40, 24), math.inf, dtype=dtype)
    compute(product, tile, {gradient.id: given[0], rows.id: given[1], y.id: got}, {})
    close(got, given[0].double().t() @ given[1].double())


def test_nothing_is_copied_for_the_gradient_of_a_weight() -> None:
    """Products of one matrix and of batches; a row that repeats is read as it lies, too."""
    b = IrBuilder()
    x = b.make("input", (), (S, 40), torch.bfloat16, index=0)
    rows = b.make("input", (), (S, 24), torch.bfloat16, index=1)
    batch = b.make("input", (), (B, S, 8), torch.bfloat16, index=2)
    y = b.make("linear", (b.permute(x, (1, 0)), b.permute(rows, (1, 0))), (40, 24), x.dtype)
    z = b.make("matmul", (b.permute(batch, (0, 2, 1)), batch), (B, 8, 8), x.dtype)
    repeated = b.broadcast(b.make("input", (), (S,), x.dtype, index=3), (40, S))
    row = b.make("linear", (repeated, b.permute(rows, (1, 0))), (40, 24), x.dtype)
    outputs = (y, z, row)
    strides = tuple(contiguous_strides(v.shape) for v in outputs)
    inputs = tuple(v for v in b.values if v.op == "input")
    graph = Graph(b.values, outputs, strides, inputs)
    made = addressable(graph, lambda _: range(0), transposed=True)
    assert [v.args[0].op for v in made.outputs] == ["permute", "permute", "broadcast"]
    made = addressable(graph, lambda _: range(0))
    assert [v.args[0].op for v in made.outputs] == ["cast", "cast", "broadcast"]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_follows_is_computed_in_the_same_kernel(tile: GemmTile, dtype: torch.dtype) -> None:
    """Bias, GELU, a residual; a second result; one number for every row."""
    torch.manual_seed(2)
    b, depth, columns = IrBuilder(), 32, 40
    x = b.make("input", (), (B, S, depth), dtype, index=0)
    residual = b.make("input", (), (B, S, columns), dtype, index=1)
    row = b.make("input", (), (B, S, 1), dtype, index=2)
    w = b.make("const", (), (columns, depth), dtype, index=0)
    bias = b.make("const", (), (columns,), dtype, index=1)
    y = b.make("linear", (x, w), (B, S, columns), dtype)
    shape = y.shape
    h = b.pointwise("add", y, b.broadcast(bias, shape))
    inner = b.pointwise("erf", b.pointwise("mul", h, b.fill(math.sqrt(0.5), shape, dtype)))
    half = b.pointwise("mul", h, b.fill(0.5, shape, dtype))
    gelu = b.pointwise("mul", half, b.pointwise("add", inner, b.fill(1.0, shape, dtype)))
    total = b.pointwise("add", gelu, residual)
    scaled = b.pointwise("mul", total, b.broadcast(row, shape))
    fused, group = fused_with(b, [total, scaled], [x, residual, row])
    epilogue = group_epilogue(group, y, fused)
    assert epilogue is not None
    product = product_of(y, epilogue)
    assert product is not None
    shapes = ((2, 17, depth), (2, 17, columns), (2, 17, 1), (columns, depth), (columns,))
    given = [torch.randn(s, dtype=dtype) for s in shapes]
    got = [torch.full((2, 17, columns), math.inf, dtype=dtype) for _ in range(2)]
    ids = (x.id, residual.id, row.id, w.id, bias.id, total.id, scaled.id)
    compute(product, tile, dict(zip(ids, (*given, *got), strict=True)), {"s0": 2, "s1": 17})
    t = [g.double() for g in given]
    want = torch.nn.functional.gelu(torch.nn.functional.linear(t[0], t[3], t[4])) + t[1]
    close(got[0], want)
    close(got[1], want * t[2])


def test_a_residual_in_another_order() -> None:
    """Rows that lie at two distances: their index is taken apart."""
    torch.manual_seed(3)
    b = IrBuilder()
    x = b.make("input", (), (B, S, 16), torch.float32, index=0)
    other = b.make("input", (), (S, B, 24), torch.float32, index=1)
    w = b.make("const", (), (24, 16), torch.float32, index=0)
    y = b.make("linear", (x, w), (B, S, 24), torch.float32)
    total = b.pointwise("add", y, b.permute(other, (1, 0, 2)))
    fused, group = fused_with(b, [total], [x, other])
    epilogue = group_epilogue(group, y, fused)
    assert epilogue is not None
    product = product_of(y, epilogue)
    assert product is not None
    given = [torch.randn(s) for s in ((3, 5, 16), (5, 3, 24), (24, 16))]
    got = torch.full((3, 5, 24), math.inf)
    ids = (x.id, other.id, w.id, total.id)
    compute(product, TILES[1], dict(zip(ids, (*given, got), strict=True)), {"s0": 3, "s1": 5})
    want = given[0].double() @ given[2].double().mT + given[1].double().transpose(0, 1)
    close(got, want)


@pytest.mark.parametrize("reads", ["reversed", "halves"])
def test_only_what_reads_its_own_point_follows(reads: str) -> None:
    b = IrBuilder()
    x = b.make("input", (), (B, S, 16), torch.float32, index=0)
    w = b.make("const", (), (24, 16), torch.float32, index=0)
    y = b.make("linear", (x, w), (B, S, 24), torch.float32)
    if reads == "reversed":
        result = b.pointwise("add", y, b.slice(y, 2, 23, -1, 24))
    else:
        result = b.pointwise("mul", b.slice(y, 2, 0, 1, 12), b.slice(y, 2, 12, 1, 12))
    fused, group = fused_with(b, [result], [x])
    assert group_epilogue(group, y, fused) is None


def test_sizes_that_are_not_known_are_left_to_the_library() -> None:
    b = IrBuilder()
    x = b.make("input", (), (B, S), torch.float32, index=0)
    w = b.make("input", (), (24, S), torch.float32, index=1)
    y = b.make("linear", (x, w), (B, 24), torch.float32)
    assert product_of(y, plain_epilogue(y)) is None

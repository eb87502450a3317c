# SPDX-License-Identifier: Apache-2.0
"""Products of 8 bits for GPUs: what is recognized, which launches run, and what they answer, in the interpreter."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from cpu_native import symbol
from library_launches import run
from op_trace import trace
from run_program import GpuProgram, compile_to_program
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu import codegen as generator
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import GemmPlan
from blade.backends.disc.gpu.gemm.product import (
    GemmProduct,
    GemmTile,
    launch,
    product_of,
)
from blade.backends.disc.gpu.passes.pipeline import FORMS
from blade.backends.disc.ir.graph import IrBuilder
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.quant.analysis.scaled_ops import ops, quantize_rows

pytestmark = pytest.mark.needs("triton_interpreter")

F16, F32, S8, F8 = torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
B, S = symbol("s0"), symbol("s1")
WIDTH = 64


@cache
def _inverses(depth: int, scale: float | None) -> torch.Tensor:
    """One tensor for all layers, as ``write`` has one for those that read the same."""
    return torch.full((depth,), 1 / (scale or 1))


class Scaled(nn.Module):
    """A linear layer in 8 bits; ``scale``: the activation's, calibrated."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.dtype, self.scale = dtype, scale
        weight, scales = quantize_rows(layer.weight.detach(), dtype)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.squeeze(1))
        self.bias = layer.bias
        self.register_buffer("inverses", _inverses(layer.weight.shape[1], scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            seen = ops.dequantize_rows(*ops.quantize_rows(x, self.dtype), x.dtype)
        else:
            seen = ops.dequantize(ops.quantize(x, self.inverses, self.dtype), self.scale, x.dtype)
        weight = ops.dequantize_channels(self.weight, self.scales, x.dtype)
        return nn.functional.linear(seen, weight, self.bias)


class Layer(nn.Module):
    """One of BERT, without its mask."""

    def __init__(
        self, narrow: torch.dtype, dtype: torch.dtype = F32, scale: float | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        linear += [nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)]
        made = [Scaled(layer.to(dtype), narrow, scale) for layer in linear]
        self.query, self.key, self.value, self.out, self.wide, self.narrow = made
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, dtype=dtype) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, 4, 16).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norms[0](x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        return self.norms[1](x + self.narrow(nn.functional.gelu(self.wide(x))))


def compiled(
    model: nn.Module, inputs: Sequence[torch.Tensor], half: torch.dtype | None = None
) -> GpuProgram:
    model.requires_grad_(False)
    gm, shape_env = trace(model, inputs, [(True, True, False)])
    return compile_to_program(lower(gm, shape_env, forms=FORMS), half)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


TILES = (GemmTile(16, 32, 32), GemmTile(32, 16, 32, split=3), GemmTile(16, 16, 64, split=2))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("narrow", [S8, F8], ids=str)
@pytest.mark.parametrize("rows", ["row", "tensor"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_what_its_definition_says(
    tile: GemmTile, narrow: torch.dtype, rows: str, biased: bool
) -> None:
    torch.manual_seed(0)
    b, depth, columns = IrBuilder(), 40, 24
    x = b.make("input", (), (B, S, depth), narrow, index=0)
    s = b.make("input", (), (B, S, 1), F32, index=1)
    w = b.make("const", (), (columns, depth), narrow, index=0)
    ws = b.make("const", (), (columns,), F32, index=1)
    bias = b.make("const", (), (columns,), F16, index=2)
    added = bias if biased else b.fill(0, (columns,), F16)
    operands, number = ([x, w, ws, added, s], 1.0) if rows == "row" else ([x, w, ws, added], 0.3)
    y = b.make("scaled_linear", operands, (B, S, columns), F16, scale=number)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    for sizes in ((1, 1), (2, 9), (0, 3)):
        shapes = ((*sizes, depth), (*sizes, 1), (columns, depth), (columns,), (columns,))
        given = [torch.randn(shape) for shape in shapes]
        for k in (0, 2):
            given[k] = (given[k] * 30).clamp(-127, 127).to(narrow)
        given[4] = given[4].half()
        got = torch.full((*sizes, columns), math.inf, dtype=F16)
        tensors = {v.id: t for v, t in zip((x, s, w, ws, bias), given, strict=True)} | {y.id: got}
        made = launch(product, tile, None, Counters(64), SizeRelations())
        run([made], tensors, {"s0": sizes[0], "s1": sizes[1]})
        sums = given[0].double() @ given[2].double().t() * given[3].double() * number
        sums = sums * given[1].double() if rows == "row" else sums
        want = sums + given[4].double() if biased else sums
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("narrow", [S8, F8], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_layer_of_bert(narrow: torch.dtype, dtype: torch.dtype) -> None:
    """Queries, keys and values are one product; norms and GELU quantize what they make."""
    model = Layer(narrow, dtype)
    program = compiled(model, [torch.randn(2, 8, WIDTH, dtype=dtype)])
    ran = program.ran(torch.randn(2, 8, WIDTH, dtype=dtype))
    # the input and what attention makes have no kernel of their own that could quantize them
    product = "linear"
    assert ran == [
        "row",
        product,
        "attention",
        "row",
        product,
        "row",
        product,
        "row",
        product,
        "row",
    ]
    for batch, length in [(2, 8), (3, 5), (1, 1), (0, 4)]:
        x = torch.randn(batch, length, WIDTH, dtype=dtype)
        [got] = program(x)
        want = model(x)
        assert got.dtype == dtype and got.shape == want.shape
        assert not got.numel() or relative(got, want) < 0.01


@pytest.mark.parametrize("narrow", [S8, F8], ids=str)
def test_calibrated_activations_are_quantized_where_they_are_made(narrow: torch.dtype) -> None:
    """GELU, which reduces nothing, and its quantization are the end of the product before it."""
    model = Layer(narrow, F16, 0.05)
    program = compiled(model, [torch.randn(2, 8, WIDTH, dtype=F16)])
    x = torch.randn(3, 7, WIDTH, dtype=F16)
    ran = program.ran(x)
    assert ran == [
        "loop",
        "linear",
        "attention",
        "loop",
        "linear",
        "row",
        "linear",
        "linear",
        "row",
    ]
    assert relative(program(x)[0], model(x)) < 0.01


def test_mixed_precision_stores_results_in_half() -> None:
    model = Layer(F8)
    x = torch.randn(2, 8, WIDTH)
    program = compiled(model, [x], F16)
    slots = [line.split() for line in program.text.splitlines() if line.startswith("slot ")]
    kinds = [(words[2], words[3]) for words in slots]
    assert kinds.count(("arena", "f8")) == 4 and ("arena", "f16") in kinds
    assert [kind for home, kind in kinds if home == "output"] == ["f32"]
    assert relative(program(x)[0], model(x)) < 0.01


@pytest.mark.parametrize("narrow", [S8, F8], ids=str)
def test_the_reference_computes_the_same(narrow: torch.dtype) -> None:
    from blade.backends.disc.gpu.passes.lower_scaled import ScaledLowerer
    from blade.backends.disc.passes.lower_quantized import lower_int8

    model = Layer(narrow).requires_grad_(False)
    x = torch.randn(2, 8, WIDTH)
    gm, shape_env = trace(model, [x], [(True, True, False)])
    graph = lower_int8(lower(gm, shape_env, forms=FORMS), ScaledLowerer)
    assert sum(v.op == "scaled_linear" for v in graph.values) == 6
    assert relative(interpret(graph, [x])[0], model(x)) < 1e-5


@pytest.mark.parametrize("biased", [(False, False), (True, False), (True, True)])
def test_products_of_one_operand_are_one_with_biases_or_without(biased: tuple[bool, bool]) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate, self.up = (
                Scaled(nn.Linear(WIDTH, 96, bias=b).half(), F8, None) for b in biased
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(self.gate(x)) * self.up(x)

    model, x = Gated(), torch.randn(2, 8, WIDTH).half()
    program = compiled(model, [x])
    assert program.ran(x) == ["row", "linear", "loop"]
    assert relative(program(x)[0], model(x)) < 0.01


def test_what_no_product_reads_is_written_out() -> None:
    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.dequantize_rows(*ops.quantize_rows(x, F8), x.dtype).tanh()

    x = torch.randn(2, 8, WIDTH)
    program = compiled(Rounded(), [x])
    assert program.ran(x) == ["row"]
    torch.testing.assert_close(program(x)[0], Rounded()(x))


def test_aten_serves_what_is_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that quantizing follows, one that a residual follows, and one that nothing does."""
    plan = GemmPlan(((15, GemmTile(16, 32, 32)), (None, None)))
    by_aten: list[bool] = []

    def planned(products: Sequence[GemmProduct], *_: object) -> dict[str, GemmPlan]:
        by_aten.extend(p.by_aten for p in products)
        return {p.key: plan for p in products}

    monkeypatch.setattr(generator, "choose_plans", planned)
    model = Layer(F8, torch.bfloat16)
    program = compiled(model, [torch.randn(2, 8, WIDTH).bfloat16()])
    assert by_aten == [True] * 4
    few, many = (torch.randn(b, 5, WIDTH).bfloat16() for b in (2, 7))
    assert "aten::_scaled_mm.out" not in program.ran(few)
    with mock.patch.object(torch.ops.aten._scaled_mm, "out", _scaled_mm):
        ran = program.ran(many)
        assert ran.count("aten::_scaled_mm.out") == 4 and "linear" not in ran
        assert relative(program(many)[0], model(many)) < 0.03


class _ScaledMM:
    """On a CPU there may be none."""

    _schema = torch.ops.aten._scaled_mm.out._schema

    def __call__(self, *args: Any, out: torch.Tensor) -> torch.Tensor:
        x, w, rows, columns, bias, _, dtype, fast = args
        assert (rows.shape, columns.shape) == ((len(x), 1), (1, w.shape[1])) and fast
        assert w.stride(0) == 1 and rows.is_contiguous() and columns.is_contiguous()
        made = (x.double() @ w.double() * rows * columns + (0 if bias is None else bias)).to(dtype)
        return out.copy_(made)


_scaled_mm = _ScaledMM()

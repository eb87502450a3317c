# SPDX-License-Identifier: Apache-2.0
"""Models with explicit quantize/dequantize against the same ops run by eager torch."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from disc_programs import legalized
from op_trace import ops_of, trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.frontend.ops.table import NAMED
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

pytest.importorskip("torch.ao.quantization.fx._decomposed")
qd = torch.ops.quantized_decomposed
Function = Callable[..., object]
I8, U8, F32 = torch.int8, torch.uint8, torch.float32


class Weight:
    """A random weight [n, k], symmetric per row; ``column`` gives the floats that a graph holds."""

    def __init__(self, n: int, k: int, transposed: bool = False) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + k)
        w = torch.randn(n, k, generator=generator)
        self.axis = 1 if transposed else 0
        self.scales = w.abs().amax(1) / 127
        self.bytes = (w / self.scales[:, None]).round().clamp(-127, 127).to(I8)
        if transposed:
            self.bytes = self.bytes.t().contiguous()
        self.bias = torch.randn(n, generator=generator)

    def floats_of_one_scale(self) -> torch.Tensor:
        return qd.dequantize_per_tensor(self.bytes, 0.011, 0, -127, 127, I8)

    def floats(self, zeros: torch.Tensor | None = None) -> torch.Tensor:
        args = (self.bytes, self.scales, zeros, self.axis, -127, 127, I8)
        return qd.dequantize_per_channel(*args)


def per_token(x: torch.Tensor) -> torch.Tensor:
    scale, zero = qd.choose_qparams_per_token(x, I8)
    q = qd.quantize_per_token(x, scale, zero, -128, 127, I8)
    return qd.dequantize_per_token(q, scale, zero, -128, 127, I8, F32)


def asymmetric(x: torch.Tensor) -> torch.Tensor:
    scale, zero = qd.choose_qparams_per_token_asymmetric(x, I8)
    q = qd.quantize_per_token(x, scale, zero, -128, 127, I8)
    return qd.dequantize_per_token(q, scale, zero, -128, 127, I8, F32)


def per_tensor(dtype: torch.dtype, scale: float = 0.021, zero: int = 3) -> Function:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max

    def quantized(x: torch.Tensor) -> torch.Tensor:
        q = qd.quantize_per_tensor(x, scale, zero, low, high, dtype)
        return qd.dequantize_per_tensor(q, scale, zero, low, high, dtype)

    return quantized


ACTIVATIONS = {
    "per_token": per_token,
    "asymmetric": asymmetric,
    "u8": per_tensor(U8, zero=120),
    "s8": per_tensor(I8),
}


def build(function: Function, samples: Sequence[torch.Tensor]) -> tuple[Engine, Graph]:
    """An engine for any leading sizes, and the graph after all passes."""
    dynamic = [[k < x.dim() - 1 for k in range(x.dim())] for x in samples]
    lowered = lower(*trace(function, samples, dynamic))
    compiled = compile_ir(lowered, host())
    engine = make_engine("q", "disc", compiled.program, compiled.object, list(compiled.constants))
    assert not engine.why_unavailable(), engine.why_unavailable()
    return engine, legalized(lowered)


def count(graph: Graph, op: str) -> int:
    return sum(v.op == op for v in graph.values)


def check(function: Function, engine: Engine, graph: Graph, *inputs: torch.Tensor) -> None:
    """As far from eager as fp32 is: sums of k products, each rounded, in other orders."""
    want = function(*inputs)
    wanted = want if isinstance(want, tuple) else (want,)
    found = engine.try_execute(list(inputs))
    assert found is not None, engine.last_error() or engine.stats()
    meant = interpret(graph, list(inputs))
    for got, reference, eager in zip(found, meant, wanted, strict=True):
        assert got.dtype == eager.dtype and got.shape == eager.shape
        torch.testing.assert_close(got, eager, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(reference, eager, rtol=2e-5, atol=2e-5)


SIZES = ((1, 1), (2, 7), (5, 13), (3, 0), (0, 4))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("depth", [64, 70])
def test_linear(name: str, depth: int) -> None:
    quantized, w = ACTIVATIONS[name], Weight(48, depth)

    def function(x):
        return F.linear(quantized(x), w.floats(), w.bias)

    engine, graph = build(function, [torch.randn(2, 3, depth)])
    assert count(graph, "int8_linear") == 1 and count(graph, "linear") == 0
    assert "kernel int8_gemm" in engine.program()
    for sizes in SIZES:
        check(function, engine, graph, torch.randn(*sizes, depth))


def test_special_values() -> None:
    """Rows of zeros, huge and tiny rows, and the ends of the range; all rows by themselves."""
    w = Weight(16, 8)

    def function(x):
        return F.linear(per_token(x), w.floats(), w.bias)

    x = torch.randn(1, 6, 8)
    x[0, 0] = 0
    x[0, 1] *= 1e30
    x[0, 2] *= 1e-30
    x[0, 3] = torch.tensor([127.0, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    engine, graph = build(function, [x])
    check(function, engine, graph, x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantizing_gives_torchs_bytes(name: str) -> None:
    """Ties to even, clamped ends: the very integers of the definition."""

    def bytes_of(x):
        if name in ("per_token", "asymmetric"):
            choose = "" if name == "per_token" else "_asymmetric"
            parameters = getattr(qd, f"choose_qparams_per_token{choose}")(x, I8)
            return qd.quantize_per_token(x, *parameters, -128, 127, I8)
        if name == "u8":
            return qd.quantize_per_tensor(x, 0.5, 7, 0, 255, U8)
        return qd.quantize_per_tensor(x, 0.25, -3, -127, 126, I8)

    engine, _ = build(bytes_of, [torch.randn(2, 3, 50)])
    for scale in (0.01, 1.0, 300.0):
        x = torch.randn(3, 41, 50) * scale
        x[0, 0] = (torch.arange(50) - 25) / 8  # ties
        [found] = engine.try_execute([x]) or pytest.fail(engine.last_error())
        assert torch.equal(found, bytes_of(x))


def test_quantize_per_channel() -> None:
    scales, zeros = torch.rand(5) + 0.1, torch.arange(-2, 3)

    def function(x):
        q = qd.quantize_per_channel(x, scales, zeros, 1, -128, 127, I8)
        return q, qd.dequantize_per_channel(q, scales, zeros, 1, -128, 127, I8)

    engine, graph = build(function, [torch.randn(4, 5, 6)])
    check(function, engine, graph, torch.randn(9, 5, 6) * 20)


def test_the_kernel_that_makes_a_row_quantizes_it() -> None:
    """Layer norm, its bytes and their scale in one kernel; the floats stay for the residual."""
    w1, w2 = Weight(128, 64), Weight(64, 128)

    def function(x):
        y = F.layer_norm(x, (64,))
        hidden = F.gelu(F.linear(per_token(y), w1.floats(), w1.bias))
        return y + F.linear(per_token(hidden), w2.floats(), w2.bias)

    engine, graph = build(function, [torch.randn(2, 3, 64)])
    lines = engine.program().split("\n")
    kernels = [line for line in lines if line.startswith("kernel ")]
    assert [line.split()[1].split("_")[0] for line in kernels] == [
        *("stitch", "int8", "row", "int8", "loop")
    ]
    for sizes in SIZES:
        check(function, engine, graph, torch.randn(*sizes, 64))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_of_one_operand_are_one(name: str) -> None:
    quantized, ws = ACTIVATIONS[name], [Weight(n, 32) for n in (16, 24, 8)]

    def function(x):
        y = quantized(x)
        a, b, c = (F.linear(y, w.floats(), None if w is ws[1] else w.bias) for w in ws)
        return a.sin(), b.cos(), c.exp()

    engine, graph = build(function, [torch.randn(2, 3, 32)])
    assert count(graph, "int8_linear") == 1
    for sizes in SIZES:
        check(function, engine, graph, torch.randn(*sizes, 32))


def through_addmm(x: torch.Tensor, w: Weight) -> torch.Tensor:
    """As a decomposed model has it."""
    flat = per_token(x).reshape(-1, x.shape[-1])
    return torch.addmm(w.bias, flat, w.floats().t()).reshape(*x.shape[:-1], -1)


def through_matmul(x: torch.Tensor, w: Weight) -> torch.Tensor:
    return torch.matmul(per_tensor(U8, zero=128)(x), w.floats()) + w.bias


def with_a_computed_bias(x: torch.Tensor, w: Weight) -> torch.Tensor:
    return F.linear(per_token(x), w.floats(), x.sum((0, 1))[:1] + w.bias)


def with_one_scale(x: torch.Tensor, w: Weight) -> torch.Tensor:
    return F.linear(per_token(x), w.floats_of_one_scale(), w.bias)


def with_zero_points_of_zero(x: torch.Tensor, w: Weight) -> torch.Tensor:
    return F.linear(per_token(x), w.floats(torch.zeros(len(w.scales), dtype=torch.int64)))


@pytest.mark.parametrize(
    ("model", "transposed"),
    [
        (through_addmm, False),
        (through_matmul, True),
        (with_a_computed_bias, False),
        (with_zero_points_of_zero, False),
        (with_one_scale, False),
    ],
)
def test_ways_to_write_a_product(model: Function, transposed: bool) -> None:
    w = Weight(40, 24, transposed)

    def function(x):
        return model(x, w)

    engine, graph = build(function, [torch.randn(2, 3, 24)])
    assert count(graph, "int8_linear") == 1
    for sizes in SIZES[:3]:
        check(function, engine, graph, torch.randn(*sizes, 24))


def test_what_is_no_product_of_bytes_is_written_out() -> None:
    """Weights with zero points, and floats that something else reads."""
    w, zeros = Weight(16, 24), torch.arange(16) - 8

    def function(x):
        y = per_token(x)
        return F.linear(y, w.floats(zeros)), F.linear(x, w.floats()), y * 2

    engine, graph = build(function, [torch.randn(2, 3, 24)])
    assert count(graph, "int8_linear") == 0 and count(graph, "dequantize") == 0
    for sizes in SIZES[:3]:
        check(function, engine, graph, torch.randn(*sizes, 24))


@pytest.mark.parametrize("has_zeros", [False, True])
def test_weights_in_groups(has_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (16, 64), generator=generator).to(I8)
    scales = torch.rand(16, 4, generator=generator) + 0.1
    zeros = torch.randint(-3, 4, (16, 4), generator=generator) if has_zeros else None

    def function(x):
        w = qd.dequantize_per_channel_group(q, scales, zeros, -8, 7, I8, 16, F32)
        return F.linear(x, w)

    engine, graph = build(function, [torch.randn(2, 3, 64)])
    products = [v for v in graph.values if v.op == "weight_only_linear"]
    assert [(v.attrs["bits"], v.attrs.get("zeros", False)) for v in products] == [(4, has_zeros)]
    for sizes in SIZES:
        check(function, engine, graph, torch.randn(*sizes, 64))


def test_every_row_of_the_table_is_here() -> None:
    x, w = torch.randn(2, 16), Weight(4, 16)
    seen = set()
    for quantized in ACTIVATIONS.values():
        seen |= ops_of(lambda x, f=quantized: F.linear(f(x), w.floats()), [x])
    others = ("quantize_per_channel", "dequantize_per_channel_group")  # in tests of their own
    tensors = ("tensor", "tensor2")  # the same rows, with numbers as tensors
    rows = [n for n in NAMED if n.startswith("quantized_decomposed.")]
    named = {n for n in rows if n.split(".")[1] not in others and n.split(".")[2] not in tensors}
    assert named and named <= {str(op) for op in seen}

# SPDX-License-Identifier: Apache-2.0
"""Products of 8 bits on the device: kernels against float64, and models through ``optimize``."""

import io
import math

import pytest
import torch
from test_gpu_library import B, L, loaded, run
from torch import nn
from torch.nn import functional

import blade
from blade.backends.disc.gpu import codegen as generator
from blade.backends.disc.gpu.gemm.benchmark import has_scaled_products
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import GemmPlan
from blade.backends.disc.gpu.gemm.product import GemmTile, launch, product_of
from blade.backends.disc.ir.graph import IrBuilder
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import target_of
from blade.backends.quant.analysis.scaled_ops import quantize_rows

pytestmark = [pytest.mark.gpu, pytest.mark.needs("triton")]
F8, S8, F16, F32 = torch.float8_e4m3fn, torch.int8, torch.float16, torch.float32
NARROW = {"fp8": F8, "int8": S8}
# Rounding to 16 bits; and sums of 8-bit floats, of which tensor cores keep some 14 bits.
TOLERANCE = {"fp8": 5e-3, "int8": 1e-3}

TILES = (
    GemmTile(16, 32, 128, 1, 4, 4),
    GemmTile(16, 64, 128, 3, 4, 4),
    GemmTile(64, 64, 128, 2, 4, 4),
    GemmTile(128, 128, 128, 1, 8, 3),
    GemmTile(128, 256, 128, 1, 8, 3),
)


@pytest.fixture(autouse=True)
def _has_them() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("floats of 8 bits take compute capability 8.9")


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products(form: str, tile: GemmTile) -> None:
    torch.manual_seed(0)
    b, depth, columns, narrow = IrBuilder(), 768, 336, NARROW[form]
    x = b.make("input", (), (B, L, depth), narrow, index=0)
    s = b.make("input", (), (B, L, 1), F32, index=1)
    w = b.make("const", (), (columns, depth), narrow, index=0)
    ws = b.make("const", (), (columns,), F32, index=1)
    bias = b.make("const", (), (columns,), F16, index=2)
    y = b.make("scaled_linear", (x, w, ws, bias, s), (B, L, columns), F16, scale=1.0)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    made = launch(product, tile, None, Counters(4096), SizeRelations(), target_of().starts_early)
    functions = loaded([made])
    for batch, length in ((1, 1), (2, 33), (4, 100)):
        q, scales = quantize_rows(torch.randn(batch, length, depth, device="cuda"), narrow)
        qw, own = quantize_rows(torch.randn(columns, depth, device="cuda"), narrow)
        added = torch.randn(columns, device="cuda", dtype=F16)
        given = (q, scales, qw, own.squeeze(1), added)
        got = torch.full((batch, length, columns), math.nan, device="cuda", dtype=F16)
        buffers = dict(zip((x.id, s.id, w.id, ws.id, bias.id, y.id), (*given, got), strict=True))
        run([made], functions, buffers, {"s0": batch, "s1": length})
        want = (q.double() * scales) @ (qw.double() * own).t() + added.double()
        error = float((got.double() - want).norm() / want.norm())
        assert error < TOLERANCE[form], error


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down, self.out = nn.Linear(3 * width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        y: torch.Tensor = self.out(torch.tanh(x))
        return y


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("form", NARROW)
def test_a_model(form: str, dtype: torch.dtype, kind: str) -> None:
    model = Block().eval().to("cuda", dtype)
    config = blade.Config(
        optimization_pipeline="quant",
        timing=False,
        min_cluster_size=1,
        quantization_type=kind,
        **{f"enable_{form}": True},
    )
    sample = torch.randn(3, 20, 128, device="cuda", dtype=dtype)
    file = io.BytesIO()
    torch.jit.save(blade.optimize(model, sample, config), file)
    file.seek(0)
    made = torch.jit.load(file)
    (cluster,) = blade.report(made).clusters
    assert cluster.backend == "quant", list(blade.report(made).all_reasons())
    assert [p.precision for p in cluster.precision] == [f"{form} {kind}"] * 3
    for batch, length in ((3, 20), (3, 20), (3, 20), (1, 1), (7, 150)):
        x = torch.randn(batch, length, 128, device="cuda", dtype=dtype)
        with torch.no_grad():
            got, want = made(x), model(x)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        error = float((got - want).float().norm() / want.float().norm())
        assert 1e-3 < error < 0.1, (batch, length, error)
    runs = sum(c.get("engine_runs", 0) for c in blade.stats(made).values())
    assert runs == 5


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("dtype", [F16, torch.bfloat16], ids=str)
def test_products_by_aten(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_scaled_products():
        pytest.skip("this ATen has no product of 8 bits with scales for rows")
    by_aten = GemmPlan(((16, GemmTile(16, 32, 128)), (None, None)))
    monkeypatch.setattr(
        generator, "choose_plans", lambda products, *_: {p.key: by_aten for p in products}
    )
    model = Block().eval().to("cuda", dtype)
    config = blade.Config(
        optimization_pipeline="quant",
        timing=False,
        min_cluster_size=1,
        quantization_type="dynamic",
        enable_fp8=True,
        cache=False,
    )
    made = blade.optimize(model, torch.randn(3, 20, 128, device="cuda", dtype=dtype), config)
    for batch, length in ((3, 20), (1, 7), (7, 150), (1, 17)):
        x = torch.randn(batch, length, 128, device="cuda", dtype=dtype)
        with torch.no_grad():
            got, want = made(x), model(x)
        error = float((got - want).float().norm() / want.float().norm())
        assert 1e-3 < error < 0.1, (batch, length, error)
    assert sum(c.get("engine_runs", 0) for c in blade.stats(made).values()) == 4


@pytest.mark.needs("runtime")
def test_a_measured_search_ends_with_something_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not 8 bits pay at this size."""
    monkeypatch.setenv("BLADE_BACKENDS", "disc,quant")
    model = Block(256).eval().half().cuda()
    sample = torch.randn(64, 64, 256, device="cuda", dtype=F16)
    made = blade.optimize(model, sample, blade.Config(enable_fp8=True, min_cluster_size=1))
    with torch.no_grad():
        got, want = made(sample), model(sample)
    assert float((got - want).float().norm() / want.float().norm()) < 0.1
    report = blade.report(made)
    (cluster,) = report.clusters
    seen = {cluster.backend, *(one.backend for one in (*cluster.tried, *report.all_reasons()))}
    assert "quant" in seen, report

# SPDX-License-Identifier: Apache-2.0
"""Every kind of kernel that DISC emits for GPUs, as units for a target: no device and no compiler is needed.

    units = KINDS["attention"](NAMED["sm_80"])

Of a product all tiles that could be timed are among them, not only those that a plan would take.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from op_trace import trace
from test_cpu_pointwise import DTYPES
from test_gpu_compile import all_ops
from torch import nn
from torch.nn import functional as F

from blade.backends.disc import compiler
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu import codegen as generator
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.gemm.plan import GemmPlan, classes_of
from blade.backends.disc.gpu.gemm.product import GemmProduct, launch
from blade.backends.disc.gpu.gemm.tile_table import candidates, unmeasured
from blade.backends.disc.gpu.passes.pipeline import FORMS
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import GpuTarget
from blade.backends.quant.analysis.scaled_ops import ops, quantize_rows

F16, BF16, F32, S8, F8 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.float8_e4m3fn,
)
FLOATS = (F32, F16, BF16)
Units = dict[str, TritonUnit]


def units_of(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[bool]],
    target: GpuTarget,
) -> Units:
    """The units of the program of ``function``, and of every tile of its products."""
    if isinstance(function, nn.Module):
        function.requires_grad_(False)
    found: Units = {}

    def plans(products: Sequence[GemmProduct], *given: Any) -> dict[str, GemmPlan]:
        for product in products:
            found.update((u.name, u) for u in _tiles(product, target, given[1]))
        return {product.key: unmeasured(product, target) for product in products}

    def note(units: Sequence[TritonUnit], *_: object) -> bytes:
        found.update((unit.name, unit) for unit in units)
        return b""

    gm, shape_env = trace(function, inputs, dynamic)
    graph = lower(gm, shape_env, forms=FORMS)
    with (
        mock.patch.object(generator, "compile_units", note),
        mock.patch.object(generator, "choose_plans", plans),
    ):
        compiler.compile_ir(graph, target)
    return found


def _tiles(product: GemmProduct, target: GpuTarget, facts: SizeRelations) -> Iterator[TritonUnit]:
    for most in classes_of(product):
        for tile in candidates(product, most, target):
            early = target.starts_early
            yield launch(product, tile, None, Counters(4096), facts, early).choice.unit


def merged(many: Iterator[Units]) -> Units:
    return {name: unit for units in many for name, unit in units.items()}


ROWS = (True, False)
SEQUENCE = (True, True, False)


def one_of_each(target: GpuTarget, deep: int = 64) -> Units:
    """A product in halves, rows and points, of one small graph."""
    layer = nn.Linear(deep, 32, dtype=F16)

    def function(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(layer(x)), torch.softmax(x, -1), F.embedding(at, x) + 1

    layer.requires_grad_(False)
    x, at = torch.randn(8, deep, dtype=F16), torch.randint(0, 8, (5,))
    found = units_of(function, [x, at], [ROWS, (True,)], target)
    products = [unit for name, unit in found.items() if name.startswith("linear")]
    most = max(products, key=lambda unit: dict(unit.constants)["BLOCK_K"])
    return {name: u for name, u in found.items() if u is most or u not in products}


def pointwise(target: GpuTarget) -> Units:
    def mixed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = F.gelu(x) * torch.sigmoid(y) + torch.tanh(x).exp()
        return torch.where(x > y, z, x), (z * 3).to(torch.int64), torch.erf(z).sin()

    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        x = torch.randn(4, 768).to(dtype)
        yield units_of(mixed, [x, x], [ROWS, ROWS], target)
        yield units_of(mixed, [x, x], [(True, True), (True, True)], target)
        yield units_of(lambda a: a.t() + 1, [x], [ROWS], target)

    return merged(units for dtype in FLOATS for units in all_of(dtype))


def reductions(target: GpuTarget) -> Units:
    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(-1), x.amax(0), x.mean(), x.prod(-1), x.argmax(-1), torch.cumsum(x, -1)

    made = ((dtype, width) for dtype in FLOATS for width in (100, 768, 4096, 32000))
    return merged(
        units_of(sums, [torch.randn(4, width).to(dtype)], [ROWS], target) for dtype, width in made
    )


def norms(target: GpuTarget) -> Units:
    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:]) + F.rms_norm(x, x.shape[-1:])

    made = [
        units_of(layer_norm, [torch.randn(4, width).to(dtype)], [ROWS], target)
        for dtype in FLOATS
        for width in (768, 8192, 20000)
    ]
    made += [
        units_of(nn.GroupNorm(32, 320), [x.to(dtype)], [(True, False, True, True)], target)
        for dtype in FLOATS
        for x in (torch.randn(2, 320, 64, 64),)
    ]
    return merged(iter(made))


def softmax(target: GpuTarget) -> Units:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(x, -1), torch.log_softmax(x * 2, -1)

    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        for width in (64, 1024, 16384):
            yield units_of(both, [torch.randn(4, width).to(dtype)], [ROWS], target)
        yield units_of(both, [torch.randn(4, 37).to(dtype)], [(True, True)], target)

    return merged(units for dtype in FLOATS for units in all_of(dtype))


def products(target: GpuTarget) -> Units:
    """With a bias, with a pointwise group, and alone."""

    def all_of(dtype: torch.dtype, deep: int, wide: int) -> Iterator[Units]:
        x = torch.randn(2, 5, deep).to(dtype)
        for bias in (True, False):
            layer = nn.Linear(deep, wide, bias).to(dtype)
            yield units_of(layer, [x], [SEQUENCE], target)
            yield units_of(nn.Sequential(layer, nn.GELU()), [x], [SEQUENCE], target)

    sizes = ((F16, 768, 768), (F16, 4096, 1024), (F16, 100, 30), (BF16, 768, 3072), (F32, 768, 768))
    return merged(units for each in sizes for units in all_of(*each))


class Narrow(nn.Module):
    """A linear layer in 8 bits, with a scale per row that is found at run time."""

    def __init__(self, deep: int, wide: int, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow = narrow
        weight, scales = quantize_rows(torch.randn(wide, deep), narrow)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.squeeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = ops.dequantize_rows(*ops.quantize_rows(x, self.narrow), x.dtype)
        return F.gelu(F.linear(seen, ops.dequantize_channels(self.weight, self.scales, x.dtype)))


def narrow_products(target: GpuTarget, narrow: torch.dtype) -> Units:
    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        for deep, wide in ((768, 3072), (4096, 4096)):
            x = torch.randn(2, 5, deep).to(dtype)
            yield units_of(Narrow(deep, wide, narrow), [x], [SEQUENCE], target)

    return merged(units for dtype in (F16, F32) for units in all_of(dtype))


def batched_products(target: GpuTarget) -> Units:
    """ATen's; with a bias in front or a group behind, that is generated."""

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.bmm(x * 2, y)) + torch.baddbmm(x, x, y)

    x = torch.randn(3, 64, 64)
    shape = [(True, False, False)] * 2
    return merged(units_of(both, [x.to(d), x.to(d)], shape, target) for d in FLOATS)


def odd_products(target: GpuTarget) -> Units:
    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        model, x = nn.Linear(768, 1001, dtype=dtype), torch.randn(4, 768, dtype=dtype)
        yield units_of(model, [x], [ROWS], target)

    return merged(units for dtype in FLOATS for units in all_of(dtype))


def depthwise(target: GpuTarget) -> Units:
    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        for channels, taps in ((64, 3), (96, 5), (20, 5)):
            conv = nn.Conv2d(channels, channels, taps, padding=taps // 2, groups=channels)
            model = nn.Sequential(conv, nn.ReLU(), nn.BatchNorm2d(channels)).to(dtype).eval()
            x = torch.randn(2, channels, 8, 8).to(dtype)
            yield units_of(model, [x], [(True, False, True, True)], target)

    return merged(units for dtype in FLOATS for units in all_of(dtype))


def convolutions(target: GpuTarget) -> Units:
    def all_of(dtype: torch.dtype) -> Iterator[Units]:
        for channels, taps in ((64, 3), (256, 1), (128, 3), (32, 3), (512, 3)):
            conv = nn.Conv2d(channels, channels, taps, padding=taps // 2)
            model = nn.Sequential(conv, nn.ReLU(), nn.BatchNorm2d(channels)).to(dtype).eval()
            x = torch.randn(2, channels, 8, 8).to(dtype)
            yield units_of(model, [x], [(True, False, True, True)], target)

    return merged(units for dtype in FLOATS for units in all_of(dtype))


HEADS = (
    (F16, 64),
    (F16, 80),
    (F16, 128),
    (F16, 192),
    (F16, 256),
    (BF16, 96),
    (F32, 64),
    (F32, 256),
)


def attention(target: GpuTarget, mask: str = "", causal: bool = False, few: bool = False) -> Units:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bias: torch.Tensor) -> Any:
        attn_mask = bias[0] if bias else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal)

    def one(dtype: torch.dtype, depth: int) -> Units:
        lengths = (1 if few else 48, 40) if not causal else (48, 48)
        q, k = (torch.randn(2, 4, length, depth).to(dtype) for length in lengths)
        inputs, axes = [q, k, k.clone()], [(True, False, True, False)] * 3
        if few:
            axes[0] = (True, False, False, False)
        if mask:
            rows = q.shape[2] if mask == "matrix" else 1
            inputs.append(torch.randn(2, 1, rows, k.shape[2]).to(dtype))
            axes.append((True, False, mask == "matrix" and not few, True))
        return units_of(attend, inputs, axes, target)

    found = merged(one(*each) for each in HEADS)
    return {name: unit for name, unit in found.items() if name.startswith("attention")}


def pooling(target: GpuTarget) -> Units:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.max_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 1), F.avg_pool2d(x, 2)

    x, axes = torch.randn(2, 64, 17, 17), [(True, False, True, True)]
    return merged(units_of(both, [x.to(dtype)], axes, target) for dtype in FLOATS)


def indexing(target: GpuTarget) -> Units:
    def both(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = F.embedding(at, x) + 1
        return rows, x[at] * 2, torch.cat([rows, x, rows * 3])

    def one(dtype: torch.dtype) -> Units:
        at = torch.randint(0, 8, (5,))
        return units_of(both, [torch.randn(8, 96).to(dtype), at], [ROWS, (True,)], target)

    return merged(one(dtype) for dtype in FLOATS)


def scatters(target: GpuTarget) -> Units:
    """Sums and maxima of what goes to one element, of rows and of numbers."""

    def both(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = F.embedding(at, x) + 1
        most = x[:, 0].scatter_reduce(0, at, rows[:, 1], "amax")
        return x.index_add(0, at, rows) + 1, most, rows[:, 0].index_add(0, at, rows[:, 1])

    def one(dtype: torch.dtype) -> Units:
        at = torch.randint(0, 5, (5,))
        return units_of(both, [torch.randn(8, 96).to(dtype), at], [ROWS, (True,)], target)

    return merged(one(dtype) for dtype in FLOATS)


def batches(target: GpuTarget) -> Units:
    """Many small launches that become one."""

    def casts(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(F16) for x in xs]

    return units_of(casts, [torch.randn(64, 32) for _ in range(32)], [(False, False)] * 32, target)


def every_op(target: GpuTarget) -> Units:
    """All pointwise ops, casts and reductions of a dtype in one kernel each."""
    made = [emit(all_ops(dtype), target)[0].unit for dtype in DTYPES]
    return {unit.name: unit for unit in made}


KINDS: dict[str, Callable[[GpuTarget], Units]] = {
    "every op": every_op,
    "pointwise": pointwise,
    "reductions": reductions,
    "norms": norms,
    "softmax": softmax,
    "products": products,
    "products with rows that begin anywhere": odd_products,
    "products in int8": partial(narrow_products, narrow=S8),
    "products in fp8": partial(narrow_products, narrow=F8),
    "batched products": batched_products,
    "convolutions": convolutions,
    "depthwise convolutions": depthwise,
    "attention": attention,
    "attention with a mask of keys": partial(attention, mask="row"),
    "attention with a mask": partial(attention, mask="matrix"),
    "causal attention": partial(attention, causal=True),
    "attention of one query": partial(attention, few=True),
    "pooling": pooling,
    "indexing": indexing,
    "scatters": scatters,
    "batches": batches,
}

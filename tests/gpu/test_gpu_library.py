# SPDX-License-Identifier: Apache-2.0
"""Our attention and product kernels on the device, through the driver, against torch in float64."""

import math
from collections.abc import Mapping, Sequence

import pytest
import sympy
import torch

from blade.backends.disc.frontend.ops.group_moments import reference as moments_reference
from blade.backends.disc.gpu.attention.autotune import choose_kernels
from blade.backends.disc.gpu.attention.calls import attention
from blade.backends.disc.gpu.compile.compile import compile_units
from blade.backends.disc.gpu.compile.driver import CudaFunction, load
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch
from blade.backends.disc.gpu.gemm.autotune import choose_plans
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.product import GemmTile, launch, product_of
from blade.backends.disc.gpu.library.group_moments import moments
from blade.backends.disc.ir.attention import attend, grouped, reference
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.attention_calls import kernels, run_sdpa
from blade.backends.disc.program.instructions import Counters, ScratchBuffer
from blade.backends.disc.target.gpu import target_of

pytestmark = [pytest.mark.gpu, pytest.mark.needs("triton")]

B, L = sympy.symbols("s0 s1", integer=True, positive=True)
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def loaded(launches: Sequence[LibraryLaunch]) -> Mapping[str, CudaFunction]:
    units = [x.choice.unit for x in launches]
    return load(compile_units(units, target_of()), {u.name for u in units})


def run(
    launches: Sequence[LibraryLaunch],
    functions: Mapping[str, CudaFunction],
    buffers: Mapping[int, torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Those that are meant for ``sizes``."""
    made: dict[int, torch.Tensor] = {}
    counters: dict[int, torch.Tensor] = {}

    def number(dim: Dim) -> int:
        return dim if isinstance(dim, int) else int(dim.subs({s: sizes[str(s)] for s in (B, L)}))

    def memory(operand: Value | ScratchBuffer | Counters) -> torch.Tensor:
        if isinstance(operand, Value):
            view = view_of(operand)
            assert view is not None, operand
            return buffers[view.base.id].view(-1)[number(view.offset) :]
        if isinstance(operand, Counters):
            zeros = torch.zeros(operand.numel, dtype=torch.int32, device="cuda")
            return counters.setdefault(id(operand), zeros)
        garbage = math.nan if operand.dtype.is_floating_point else -(1 << 30)
        nothing = torch.full((number(operand.numel),), garbage, dtype=operand.dtype, device="cuda")
        return made.setdefault(id(operand), nothing)

    for one in launches:
        when = one.choice.when
        if when is None or bool(when.subs({s: sizes[str(s)] for s in (B, L)})):
            x, y, z = map(number, one.choice.grid)
            operands, ints = [memory(o) for o in one.operands], [number(i) for i in one.ints]
            functions[one.choice.unit.name].launch((x, y, z), operands, ints)
    torch.cuda.synchronize()
    assert not any(x.any() for x in counters.values())


HEADS = [(torch.float16, depth) for depth in (16, 40, 64, 80, 96, 128, 160, 256)]
HEADS += [(torch.bfloat16, 64), (torch.float32, 64), (torch.float32, 128)]


@pytest.mark.parametrize(("dtype", "depth"), HEADS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "row", "matrix"])
def test_attention(dtype: torch.dtype, depth: int, kind: str) -> None:
    """``kind``: a bias for every key, or one for every score."""
    torch.manual_seed(0)
    b, heads = IrBuilder(), 3
    x = b.make("input", (), (B, L, 3 * heads * depth), dtype, index=0)
    biased, causal = kind in ("row", "matrix"), kind == "causal"
    m = b.make("input", (), (B, 1, L if kind == "matrix" else 1, L), dtype, index=1)

    def part(k: int) -> Value:
        y = b.slice(x, 2, k * heads * depth, 1, heads * depth)
        return b.permute(b.reshape(y, (B, L, heads, depth)), (0, 2, 1, 3))

    bias = b.broadcast(m, (B, heads, L, L)) if biased else None
    made = attend(b, part(0), part(1), part(2), bias, depth**-0.5, causal).args[0]
    launches = attention(made, target_of(), SizeRelations())
    assert launches is not None
    functions = loaded(launches)
    for batch, length in ((2, 1), (3, 16), (2, 31), (1, 130), (2, 384), (1, 700), (29, 390)):
        given = torch.randn(batch, length, 3 * heads * depth, dtype=dtype, device="cuda")
        rows = length if kind == "matrix" else 1
        mask = torch.randn(batch, 1, rows, length, device="cuda").to(dtype)
        mask[..., length // 2 + 1 :] = torch.finfo(dtype).min
        got = torch.full((batch, length, heads, depth), math.nan, dtype=dtype, device="cuda")
        buffers = {x.id: given, m.id: mask, made.id: got}
        run(launches, functions, buffers, {"s0": batch, "s1": length})
        parts = given.double().cpu().view(batch, length, 3, heads, depth).permute(2, 0, 3, 1, 4)
        wide = mask.double().cpu().expand(batch, heads, length, length) if biased else None
        want = reference(made, *parts, wide)
        torch.testing.assert_close(
            got.double().cpu(), want, rtol=0, atol=TOLERANCE[dtype], equal_nan=True
        )


@pytest.mark.parametrize("depth", [40, 64, 128])
@pytest.mark.parametrize("keys", [100, 512, 1000, 5000])
def test_one_query(depth: int, keys: int) -> None:
    """Keys that several programs share, heads in groups."""
    torch.manual_seed(0)
    b, dtype = IrBuilder(), torch.float16
    q = b.make("input", (), (B, 6, 1, depth), dtype, index=0)
    k, v = (b.make("input", (), (B, 2, L, depth), dtype, index=n) for n in (1, 2))
    made = grouped(b, q, k, v, None, depth**-0.5)
    while made.is_layout:
        made = made.args[0]
    launches = attention(made, target_of(), SizeRelations())
    assert launches is not None
    functions = loaded(launches)
    for batch in (1, 3, 40):
        given = [torch.randn(batch, 6, 1, depth, dtype=dtype, device="cuda")]
        given += [torch.randn(batch, 2, keys, depth, dtype=dtype, device="cuda") for _ in range(2)]
        shape = [d if isinstance(d, int) else batch for d in made.shape]
        got = torch.full(shape, math.nan, dtype=dtype, device="cuda")
        buffers = dict(zip((q.id, k.id, v.id, made.id), (*given, got), strict=True))
        run(launches, functions, buffers, {"s0": batch, "s1": keys})
        wide = [given[0].view(batch, 2, 3, 1, depth), *(x[:, :, None] for x in given[1:])]
        want = reference(made, *(x.double().cpu() for x in wide))
        torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_aten(groups: int, causal: bool) -> None:
    """Every kernel that says it takes it answers the same; measuring them leaves torch's generator alone."""
    torch.manual_seed(0)
    b, heads, depth, length = IrBuilder(), 8, 64, 1100
    q = b.make("input", (), (5, heads, length, depth), torch.float16, index=0)
    few = (5, heads // groups, length, depth)
    k, v = (b.make("input", (), few, torch.float16, index=n) for n in (1, 2))
    made = grouped(b, q, k, v, None, 0.125, causal)
    while made.is_layout:
        made = made.args[0]
    names = kernels(made, SizeRelations())
    assert names == (("flash",) if groups > 1 else ("flash", "cudnn"))
    shapes = ((5, heads, length, depth), few, few)
    given = [torch.randn(s, device="cuda").half() for s in shapes]
    wide = [x.repeat_interleave(groups if n else 1, 1).double().cpu() for n, x in enumerate(given)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, scale=0.125)
    for name in names:
        got = torch.full((5, length, heads, depth), math.nan, dtype=torch.float16, device="cuda")
        run_sdpa([x.transpose(1, 2) for x in given], got, made, name)
        torch.testing.assert_close(got.double().cpu(), want.transpose(1, 2), rtol=0, atol=4e-3)
    state = torch.cuda.get_rng_state()
    assert set(choose_kernels([made], target_of(), SizeRelations(), None).values()) <= {*names}
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.parametrize("last", [False, True])
def test_moments(last: bool) -> None:
    """One program a group, and several that leave their counters zero; a mean far from zero."""
    torch.manual_seed(0)
    b, channels = IrBuilder(), 40
    shape = (B, L, channels) if last else (B, channels, L)
    x = b.make("input", (), shape, torch.float16, index=0)
    y = b.permute(x, (0, 2, 1)) if last else x
    attrs = {"groups": 4, "eps": 1e-5}
    made = b.make("group_moments", (y,), (2, B, channels), torch.float32, **attrs)
    launches = moments(made, target_of(), Counters(4096), SizeRelations())
    functions = loaded(launches)
    for batch, pixels in ((2, 1), (1, 77), (200, 64), (3, 4096), (1, 100003), (60, 2000)):
        sizes = (batch, pixels, channels) if last else (batch, channels, pixels)
        given = torch.randn(sizes, device="cuda").add(20).half()
        got = torch.full((2, batch, channels), math.nan, device="cuda")
        run(launches, functions, {x.id: given, made.id: got}, {"s0": batch, "s1": pixels})
        seen = given.double().cpu()
        want = moments_reference(made, seen.mT if last else seen)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=0)


TILES = (
    GemmTile(16, 32, 64, 1, 4, 4),
    GemmTile(32, 32, 64, 3, 4, 4),
    GemmTile(32, 64, 64, 4, 4, 3),
    GemmTile(64, 64, 64, 2, 4, 3),
    GemmTile(128, 128, 32, 1, 8, 3),
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products(dtype: torch.dtype, tile: GemmTile) -> None:
    """Twice the same bits, whichever of a block's programs arrives last."""
    torch.manual_seed(0)
    b, depth, columns = IrBuilder(), 768, 328
    x = b.make("input", (), (B, L, depth), dtype, index=0)
    w = b.make("const", (), (columns, depth), dtype, index=0)
    bias = b.make("const", (), (columns,), dtype, index=1)
    y = b.make("linear", (x, w, bias), (B, L, columns), dtype)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    made = launch(product, tile, None, Counters(4096), SizeRelations(), target_of().starts_early)
    functions = loaded([made])
    for batch, length in ((1, 1), (2, 33), (4, 100)):
        shapes = ((batch, length, depth), (columns, depth), (columns,))
        given = [torch.randn(s, device="cuda").mul(0.2).to(dtype) for s in shapes]
        got = [torch.full((batch, length, columns), math.nan, device="cuda") for _ in range(2)]
        got = [g.to(dtype) for g in got]
        for result in got:
            buffers = dict(zip((x.id, w.id, bias.id, y.id), (*given, result), strict=True))
            run([made], functions, buffers, {"s0": batch, "s1": length})
        want = torch.nn.functional.linear(*(t.double() for t in given))
        torch.testing.assert_close(
            got[0].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert torch.equal(got[0], got[1])


def test_what_is_measured_is_a_plan_for_every_number_of_rows() -> None:
    b = IrBuilder()
    x = b.make("input", (), (B, L, 768), torch.float16, index=0)
    w = b.make("const", (), (768, 768), torch.float16, index=0)
    y = b.make("linear", (x, w), (B, L, 768), torch.float16)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    state = torch.cuda.get_rng_state()
    plan = choose_plans([product], target_of(), SizeRelations(), None)[product.key]
    assert plan.ranges[-1] == (
        None,
        None,
    )  # nothing follows this product: ATen's, where rows are many
    assert torch.equal(state, torch.cuda.get_rng_state())

# SPDX-License-Identifier: Apache-2.0
"""Our attention and product kernels on the device, through the driver, against torch in float64."""

import math
from collections.abc import Mapping, Sequence

import pytest
import sympy
import torch

from blade.backends.disc.attention import attend, reference
from blade.backends.disc.facts import Facts
from blade.backends.disc.gpu.attention import attention
from blade.backends.disc.gpu.choose import choose
from blade.backends.disc.gpu.compile import compile_units
from blade.backends.disc.gpu.driver import Function, load
from blade.backends.disc.gpu.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm import Tile, launch, product_of
from blade.backends.disc.gpu.launch import LibraryLaunch
from blade.backends.disc.gpu.target import target_of
from blade.backends.disc.ir import Builder, Value
from blade.backends.disc.kernel import Dim
from blade.backends.disc.steps import Counters, Scratch
from blade.backends.disc.views import view_of

pytestmark = [pytest.mark.gpu, pytest.mark.needs("triton")]

B, L = sympy.symbols("s0 s1", integer=True, positive=True)
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def loaded(launches: Sequence[LibraryLaunch]) -> Mapping[str, Function]:
    units = [x.choice.unit for x in launches]
    return load(compile_units(units, target_of()), {u.name for u in units})


def run(
    launches: Sequence[LibraryLaunch],
    functions: Mapping[str, Function],
    buffers: Mapping[int, torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Those that are meant for ``sizes``."""
    made: dict[int, torch.Tensor] = {}

    def number(dim: Dim) -> int:
        return dim if isinstance(dim, int) else int(dim.subs({s: sizes[str(s)] for s in (B, L)}))

    def memory(operand: Value | Scratch | Counters) -> torch.Tensor:
        if isinstance(operand, Value):
            view = view_of(operand)
            assert view is not None, operand
            return buffers[view.base.id].view(-1)[number(view.offset) :]
        if isinstance(operand, Counters):
            zeros = torch.zeros(operand.numel, dtype=torch.int32, device="cuda")
            return made.setdefault(id(operand), zeros)
        nothing = torch.full((number(operand.numel),), math.nan, dtype=operand.dtype, device="cuda")
        return made.setdefault(id(operand), nothing)

    for one in launches:
        when = one.choice.when
        if when is None or bool(when.subs({s: sizes[str(s)] for s in (B, L)})):
            x, y, z = map(number, one.choice.grid)
            operands, ints = [memory(o) for o in one.operands], [number(i) for i in one.ints]
            functions[one.choice.unit.name].launch((x, y, z), operands, ints)
    torch.cuda.synchronize()
    assert all(not x.any() for x in made.values() if x.dtype == torch.int32)


HEADS = [(torch.float16, depth) for depth in (16, 64, 80, 128, 256)]
HEADS += [(torch.bfloat16, 64), (torch.float32, 64), (torch.float32, 128)]


@pytest.mark.parametrize(("dtype", "depth"), HEADS, ids=str)
@pytest.mark.parametrize(("causal", "biased"), [(False, False), (False, True), (True, False)])
def test_attention(dtype: torch.dtype, depth: int, causal: bool, biased: bool) -> None:
    torch.manual_seed(0)
    b, heads = Builder(), 3
    x = b.make("input", (), (B, L, 3 * heads * depth), dtype, index=0)
    m = b.make("input", (), (B, 1, 1, L), dtype, index=1)

    def part(k: int) -> Value:
        y = b.slice(x, 2, k * heads * depth, 1, heads * depth)
        return b.permute(b.reshape(y, (B, L, heads, depth)), (0, 2, 1, 3))

    bias = b.broadcast(m, (B, heads, L, L)) if biased else None
    made = attend(b, part(0), part(1), part(2), bias, depth**-0.5, causal).args[0]
    launches = attention(made, target_of(), Facts())
    assert launches is not None
    functions = loaded(launches)
    for batch, length in ((2, 1), (3, 16), (2, 31), (1, 130), (2, 384), (1, 700)):
        given = torch.randn(batch, length, 3 * heads * depth, dtype=dtype, device="cuda")
        mask = torch.zeros(batch, 1, 1, length, dtype=dtype, device="cuda")
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


TILES = (
    Tile(16, 32, 64, 1, 4, 4),
    Tile(32, 32, 64, 3, 4, 4),
    Tile(32, 64, 64, 4, 4, 3),
    Tile(64, 64, 64, 2, 4, 3),
    Tile(128, 128, 32, 1, 8, 3),
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products(dtype: torch.dtype, tile: Tile) -> None:
    """Twice the same bits, whichever of a block's programs arrives last."""
    torch.manual_seed(0)
    b, depth, columns = Builder(), 768, 328
    x = b.make("input", (), (B, L, depth), dtype, index=0)
    w = b.make("const", (), (columns, depth), dtype, index=0)
    bias = b.make("const", (), (columns,), dtype, index=1)
    y = b.make("linear", (x, w, bias), (B, L, columns), dtype)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    made = launch(product, tile, None, Counters(4096), Facts(), target_of().starts_early)
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
    b = Builder()
    x = b.make("input", (), (B, L, 768), torch.float16, index=0)
    w = b.make("const", (), (768, 768), torch.float16, index=0)
    y = b.make("linear", (x, w), (B, L, 768), torch.float16)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    state = torch.cuda.get_rng_state()
    plan = choose([product], target_of(), Facts(), None)[product.key]
    assert plan.ranges[-1] == (
        None,
        None,
    )  # nothing follows this product: ATen's, where rows are many
    assert torch.equal(state, torch.cuda.get_rng_state())

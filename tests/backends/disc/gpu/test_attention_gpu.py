# SPDX-License-Identifier: Apache-2.0
"""Generated attention for GPUs: values in Triton's interpreter, against the reference in float64."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cpu_native import evaluate, symbol
from library_launches import holds, run

from blade.backends.disc.gpu.attention import calls
from blade.backends.disc.gpu.attention.calls import FEWEST_KEYS, attention
from blade.backends.disc.gpu.attention.tile_table import parts_of
from blade.backends.disc.ir.attention import attend, grouped, reference
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.target.gpu import GpuTarget

pytestmark = pytest.mark.needs("triton_interpreter")

B, L, S = symbol("s0"), symbol("s1"), symbol("s2")
TARGET = GpuTarget()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def merged(
    b: IrBuilder, heads: int, depth: int, dtype: torch.dtype, length: Dim = L
) -> tuple[Value, list[Value]]:
    """Queries, keys and values in one product's rows, as strided views of it."""
    x = b.make("input", (), (B, length, 3 * heads * depth), dtype, index=0)

    def part(k: int) -> Value:
        y = b.slice(x, 2, k * heads * depth, 1, heads * depth)
        return b.permute(b.reshape(y, (B, length, heads, depth)), (0, 2, 1, 3))

    return x, [part(k) for k in range(3)]


def check(
    made: Value,
    tensors: dict[int, torch.Tensor],
    sizes: dict[str, int],
    operands: list[torch.Tensor | None],
    tolerance: float = 0.0,
) -> int:
    """Runs ``made``'s launches and compares; how many launches that took."""
    tolerance = max(tolerance, TOLERANCE[made.dtype])
    launches = attention(made, TARGET, SizeRelations())
    assert launches is not None
    want = reference(made, *[None if x is None else x.double() for x in operands])
    got = torch.full(want.shape, math.inf, dtype=made.dtype)
    ran = run(launches, {**tensors, made.id: got}, sizes)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance, equal_nan=True)
    return len(ran)


def source(made: Value) -> Value:
    return made.args[0] if made.is_layout else made


@pytest.mark.parametrize("sizes", [(2, 1), (1, 16), (2, 17), (1, 33), (1, 130)])
@pytest.mark.parametrize("causal", [False, True])
def test_strided_out_of_a_merged_product(sizes: tuple[int, int], causal: bool) -> None:
    torch.manual_seed(0)
    b, heads, depth = IrBuilder(), 2, 24
    x, (q, k, v) = merged(b, heads, depth, torch.float32)
    made = source(attend(b, q, k, v, None, 0.2, causal))
    given = torch.randn(*sizes, 3 * heads * depth)
    parts = [p.view(*sizes, heads, depth).transpose(1, 2) for p in given.split(heads * depth, -1)]
    check(made, {x.id: given}, {"s0": sizes[0], "s1": sizes[1]}, [*parts, None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ["row", "matrix", "head"])
@pytest.mark.parametrize("length", [40, 41])
def test_bias_is_read_where_it_repeats(dtype: torch.dtype, shape: str, length: int) -> None:
    """Rows that begin at multiples of 16 bytes, and rows that do not."""
    torch.manual_seed(1)
    b, heads, depth, size = IrBuilder(), 2, 16, (2, length)
    x, (q, k, v) = merged(b, heads, depth, dtype)
    kinds = {"row": (B, 1, 1, L), "matrix": (1, 1, L, L), "head": (1, heads, L, L)}
    m = b.make("input", (), kinds[shape], dtype, index=1)
    made = source(attend(b, q, k, v, b.broadcast(m, (B, heads, L, L)), 0.25))
    given = torch.randn(*size, 3 * heads * depth, dtype=dtype)
    sizes = {"s0": size[0], "s1": size[1]}
    extents = [int(d) if isinstance(d, int) else sizes[str(d)] for d in kinds[shape]]
    bias = torch.randn(extents, dtype=dtype)
    bias[..., 3] = -math.inf
    parts = [p.view(*size, heads, depth).transpose(1, 2) for p in given.split(heads * depth, -1)]
    wide = bias.expand(2, heads, length, length)
    check(made, {x.id: given, m.id: bias}, sizes, [*parts, wide])


@pytest.mark.parametrize("depth", [48, 80, 96, 160])
@pytest.mark.parametrize("length", [20, 70])
def test_depths_that_are_two_powers_of_two(depth: int, length: int) -> None:
    torch.manual_seed(6)
    assert sum(parts_of(depth)) < 1 << depth.bit_length()
    b = IrBuilder()
    x, (q, k, v) = merged(b, 1, depth, torch.float32)
    made = source(attend(b, q, k, v, None, 0.1))
    given = torch.randn(1, length, 3 * depth)
    parts = [p.view(1, length, 1, depth).transpose(1, 2) for p in given.split(depth, -1)]
    check(made, {x.id: given}, {"s0": 1, "s1": length}, [*parts, None])


def test_blocks_cover_every_depth() -> None:
    for depth in range(1, 257):
        first, second = parts_of(depth)
        assert first >= 16 and first & (first - 1) == 0 and second & (second - 1) == 0
        assert first + second == depth if second else first >= depth
    assert [parts_of(d) for d in (80, 96, 160)] == [(64, 16), (64, 32), (128, 32)]


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_rows_without_any_key(undefined: bool, lowest: float) -> None:
    """All scores -inf: 0, or NaN where the model wrote the softmax out; all the lowest number: the mean."""
    torch.manual_seed(2)
    b, size = IrBuilder(), (1, 20)
    x, (q, k, v) = merged(b, 1, 16, torch.float32)
    m = b.make("input", (), (B, 1, L, L), torch.float32, index=1)
    made = source(attend(b, q, k, v, m, 0.25, undefined=undefined))
    given, bias = torch.randn(*size, 48), torch.zeros(1, 1, 20, 20)
    bias[:, :, 4] = lowest
    parts = [p.view(1, 20, 1, 16).transpose(1, 2) for p in given.split(16, -1)]
    check(made, {x.id: given, m.id: bias}, {"s0": 1, "s1": 20}, [*parts, bias])


def test_a_row_without_any_key_still_meets_infinite_values() -> None:
    """0 times infinity: NaN, as ATen's math kernel has it."""
    torch.manual_seed(8)
    b = IrBuilder()
    x, (q, k, v) = merged(b, 1, 16, torch.float32)
    m = b.make("input", (), (B, 1, L, L), torch.float32, index=1)
    made = source(attend(b, q, k, v, m, 0.25))
    given, bias = torch.randn(1, 20, 48), torch.zeros(1, 1, 20, 20)
    bias[:, :, 4] = -math.inf
    given[:, 7, 35] = math.inf
    parts = [p.view(1, 20, 1, 16).transpose(1, 2) for p in given.split(16, -1)]
    launches = attention(made, TARGET, SizeRelations())
    assert launches is not None
    got = torch.zeros(1, 20, 1, 16)
    run(launches, {x.id: given, m.id: bias, made.id: got}, {"s0": 1, "s1": 20})
    math_kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_kernel:
        want = torch.nn.functional.scaled_dot_product_attention(*parts, bias, scale=0.25)
    assert want[0, 0, 4].isnan().sum() == 1
    torch.testing.assert_close(got.view(20, 16), want[0, 0], rtol=0, atol=2e-6, equal_nan=True)


def test_bias_in_the_place_of_scores() -> None:
    torch.manual_seed(3)
    b = IrBuilder()
    x, (q, k, v) = merged(b, 1, 16, torch.float32)
    m = b.make("input", (), (B, 1, L, L), torch.float32, index=1)
    made = source(attend(b, q, k, v, m, -0.25, undefined=True, fill=-3.0))
    given, bias = torch.randn(2, 18, 48), torch.zeros(2, 1, 18, 18)
    bias[torch.rand_like(bias) < 0.5] = -3.0
    parts = [p.view(2, 18, 1, 16).transpose(1, 2) for p in given.split(16, -1)]
    check(made, {x.id: given, m.id: bias}, {"s0": 2, "s1": 18}, [*parts, bias])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fill", [None, -math.inf, torch.finfo(torch.float16).min])
@pytest.mark.parametrize("keys", [9, FEWEST_KEYS + 5])
def test_capped_and_filled(keys: int, fill: float | None, dtype: torch.dtype) -> None:
    """Few queries, whose keys several programs share where they are many."""
    torch.manual_seed(6)
    b = IrBuilder()
    q = b.make("input", (), (B, 2, 3, 16), dtype, index=0)
    k, v = (b.make("input", (), (B, 2, S, 16), dtype, index=i) for i in (1, 2))
    m = b.make("input", (), (3, S), dtype, index=3)
    bias = b.broadcast(m, (B, 2, 3, S))
    made = source(attend(b, q, k, v, bias, 0.25, undefined=True, cap=0.75, fill=fill))
    given = [torch.randn(1, 2, n, 16, dtype=dtype) for n in (3, keys, keys)]
    mask = torch.randn(3, keys, dtype=dtype)
    if fill is not None:
        given[1][..., 1, :] = math.nan
        mask[torch.rand_like(mask) < 0.4] = fill
        mask[:, 1] = fill
        mask[2] = fill
    tensors = dict(zip((q.id, k.id, v.id, m.id), (*given, mask), strict=True))
    check(made, tensors, {"s0": 1, "s2": keys}, [*given, mask.expand(1, 2, 3, keys)])


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("keys", [9, FEWEST_KEYS + 5])
@pytest.mark.parametrize("masked", [False, True])
def test_a_key_without_a_value(keys: int, queries: int, masked: bool) -> None:
    """Of groups of heads, which are queries of one head where there is one query; one has all weight, one none."""
    torch.manual_seed(8)
    b = IrBuilder()
    q = b.make("input", (), (B, 6, L, 16), torch.bfloat16, index=0)
    k, v = (b.make("input", (), (B, 2, S, 16), torch.bfloat16, index=i) for i in (1, 2))
    m = b.make("input", (), (L, S), torch.bfloat16, index=3)
    sinks = b.make("input", (), (6, 1, 1), torch.bfloat16, index=4)
    bias = b.broadcast(m, (B, 6, L, S)) if masked else None
    sink = b.broadcast(sinks, (B, 6, 1, 1))
    made = grouped(b, q, k, v, bias, 0.25, undefined=True, sink=sink)
    while made.is_layout:
        made = made.args[0]
    given = [torch.randn(2, n, x, 16).bfloat16() for n, x in ((6, queries), (2, keys), (2, keys))]
    mask, ends = torch.randn(queries, keys).bfloat16(), torch.randn(6, 1, 1).bfloat16()
    ends[0], ends[4] = 1e4, -math.inf
    wide = [given[0].unflatten(1, (2, 3))]
    wide += [x[:, :, None].expand(2, 2, 3, *x.shape[-2:]) for x in given[1:]]
    wide += [mask] * masked
    tensors = dict(zip((q.id, k.id, v.id, m.id, sinks.id), (*given, mask, ends), strict=True))
    sizes = {"s0": 2, "s1": queries, "s2": keys}
    check(made, tensors, sizes, [*wide, ends.view(2, 3, 1, 1)])


def test_a_cap_without_a_bias() -> None:
    torch.manual_seed(7)
    b = IrBuilder()
    x, (q, k, v) = merged(b, 1, 16, torch.float32)
    made = source(attend(b, q, k, v, None, 0.25, cap=0.5))
    given = torch.randn(1, 70, 48)
    parts = [p.view(1, 70, 1, 16).transpose(1, 2) for p in given.split(16, -1)]
    check(made, {x.id: given}, {"s0": 1, "s1": 70}, [*parts, None])


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    torch.manual_seed(4)
    b = IrBuilder()
    x, (q, k, v) = merged(b, 1, 16, torch.float32)
    made = source(attend(b, q, k, v, None, scale))
    given = torch.randn(1, 19, 48)
    parts = [p.view(1, 19, 1, 16).transpose(1, 2) for p in given.split(16, -1)]
    check(made, {x.id: given}, {"s0": 1, "s1": 19}, [*parts, None])


@pytest.mark.parametrize("keys", [0, 1, FEWEST_KEYS - 1, FEWEST_KEYS + 5])
@pytest.mark.parametrize("columns", [20, 40])
def test_decoding_shares_many_keys_between_programs(keys: int, columns: int) -> None:
    """One query; grouped heads; keys and values of different widths."""
    torch.manual_seed(5)
    b = IrBuilder()
    q = b.make("input", (), (B, 4, 1, 32), torch.float32, index=0)
    k = b.make("input", (), (B, 2, S, 32), torch.float32, index=1)
    v = b.make("input", (), (B, 2, S, columns), torch.float32, index=2)
    m = b.make("input", (), (1, 1, 1, S), torch.float32, index=3)
    bias = b.broadcast(m, (B, 4, 1, S))
    made = grouped(b, q, k, v, bias, 0.1)
    while made.is_layout:
        made = made.args[0]
    given = [
        torch.randn(1, 4, 1, 32),
        torch.randn(1, 2, keys, 32),
        torch.randn(1, 2, keys, columns),
    ]
    mask = torch.randn(1, 1, 1, keys)
    wide = [given[0].view(1, 2, 2, 1, 32)]
    wide += [x[:, :, None].expand(1, 2, 2, *x.shape[-2:]) for x in given[1:]]
    tensors = {q.id: given[0], k.id: given[1], v.id: given[2], m.id: mask}
    ran = check(made, tensors, {"s0": 1, "s2": keys}, [*wide, mask[None].expand(1, 2, 2, 1, keys)])
    assert ran == (2 if keys >= FEWEST_KEYS else 1)


@pytest.mark.parametrize("keys", [7, FEWEST_KEYS + 5])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_one_query_of_heads_that_share_keys(keys: int, queries: int, masked: bool) -> None:
    """They are queries of one head then, whose number is only known when it runs; masks of their own, too."""
    torch.manual_seed(7)
    b = IrBuilder()
    q = b.make("input", (), (B, 6, L, 16), torch.float32, index=0)
    k, v = (b.make("input", (), (B, 2, S, 16), torch.float32, index=n) for n in (1, 2))
    m = b.make("input", (), (6 if masked else 1, L, S), torch.float32, index=3)
    made = grouped(b, q, k, v, b.broadcast(m, (B, 6, L, S)), 0.1)
    while made.is_layout:
        made = made.args[0]
    given = [torch.randn(2, 6, queries, 16), *(torch.randn(2, 2, keys, 16) for _ in range(2))]
    mask = torch.randn(6 if masked else 1, queries, keys)
    wide = [given[0].view(2, 2, 3, queries, 16), *(x[:, :, None] for x in given[1:])]
    bias = mask.expand(2, 6, queries, keys).reshape(2, 2, 3, queries, keys)
    tensors = dict(zip((q.id, k.id, v.id, m.id), (*given, mask), strict=True))
    check(made, tensors, {"s0": 2, "s1": queries, "s2": keys}, [*wide, bias])
    launches = attention(made, TARGET, SizeRelations())
    assert launches is not None
    [first, *_] = [x for x in launches if holds(x, {"s0": 2, "s1": queries, "s2": 7})]
    grid = evaluate(first.choice.grid[0], {"s0": 2, "s1": queries, "s2": 7})
    assert grid == (4 if queries == 1 else 12)


def window(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (i >= j) & (i - j < 40)


def later(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The first 70 queries see no key."""
    return (i >= 70) & (j >= 90) & (j < 150)


def most(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Some blocks of queries see all keys."""
    return (i >= 128) | (j >= 70)


def holes(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (j % 130 < 20) | (j == i)


@pytest.mark.parametrize("seen", [window, later, most, holes, torch.ge])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("length", "known"), [(200, False), (203, False), (256, True)])
@pytest.mark.parametrize("never", [-math.inf, -65504.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_that_no_query_of_a_block_sees_are_left_out(
    seen: Callable[..., torch.Tensor],
    own: bool,
    length: int,
    known: bool,
    never: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``own``: each text has its own mask. A query that sees none weighs all alike unless ``never`` is infinite."""
    monkeypatch.setattr(calls, "BOUNDED_KEYS", 128)
    torch.manual_seed(9)
    b, heads, depth, size = IrBuilder(), 4, 16, length if known else L
    x, (q, k, v) = merged(b, heads, depth, dtype, size)
    bias = b.make("input", (), (B if own else 1, 1, size, size), dtype, index=1)
    made = source(attend(b, q, k, v, b.broadcast(bias, (B, heads, size, size)), 0.25, hides=True))
    places = torch.arange(length)
    mask = seen(places[:, None], places[None, :])[None, None]
    mask = torch.cat([mask, mask.roll(37, -2)], 0) if own else mask
    given = torch.randn(2, length, 3 * heads * depth, dtype=dtype)
    parts = [
        p.view(2, length, heads, depth).transpose(1, 2) for p in given.split(heads * depth, -1)
    ]
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, never)
    wide = added.expand(2, heads, length, length)
    sizes = {"s0": 2, "s1": length}
    # A score near -65504 is a multiple of 1/128 in float32.
    tolerance = 2e-3 if seen is later and never > -math.inf else 0.0
    assert check(made, {x.id: given, bias.id: added}, sizes, [*parts, wide], tolerance) == 2


@pytest.mark.parametrize("ends", [(200, 128), (128, 64), (0, 192)])
def test_keys_behind_the_end_of_a_text_are_not_read(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BOUNDED_KEYS", 128)
    torch.manual_seed(10)
    b, length = IrBuilder(), 200
    x, (q, k, v) = merged(b, 4, 16, torch.float32)
    bias = b.make("input", (), (B, 1, 1, L), torch.float32, index=1)
    made = source(attend(b, q, k, v, b.broadcast(bias, (B, 4, L, L)), 0.25, hides=True))
    given = torch.randn(2, length, 192)
    parts = [p.view(2, length, 4, 16).transpose(1, 2) for p in given.clone().split(64, -1)]
    behind = torch.arange(length) >= torch.tensor(ends)[:, None]
    added = torch.zeros(2, 1, 1, length).masked_fill(behind[:, None, None], -math.inf)
    given[..., 64:][behind] = math.nan
    wide = added.expand(2, 4, length, length)
    assert check(made, {x.id: given, bias.id: added}, {"s0": 2, "s1": length}, [*parts, wide]) == 2


@pytest.mark.parametrize("ends", [(0, 40), (300, 340), (517, 600), (0, 600), (100, 100)])
@pytest.mark.parametrize(("queries", "processors"), [(1, 16), (1, 2), (3, 16), (3, 2)])
@pytest.mark.parametrize("never", [-math.inf, -65504.0])
def test_few_queries_read_no_hidden_keys(
    ends: tuple[int, int],
    queries: int,
    processors: int,
    never: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ends``: of the keys that are seen. With few processors, one program has all keys of a query."""
    target = replace(TARGET, multiprocessors=processors)
    monkeypatch.setattr(sys.modules[__name__], "TARGET", target)
    monkeypatch.setattr(calls, "BOUNDED_KEYS", 128)
    monkeypatch.setattr(calls, "MUCH", 1)
    torch.manual_seed(11)
    b, batch, keys = IrBuilder(), 1, 600
    q = b.make("input", (), (B, 8, L, 16), torch.float32, index=0)
    k, v = (b.make("input", (), (B, 2, S, 16), torch.float32, index=n) for n in (1, 2))
    m = b.make("input", (), (B, 1, L, S), torch.float32, index=3)
    made = grouped(b, q, k, v, b.broadcast(m, (B, 8, L, S)), 0.1, hides=True)
    while made.is_layout:
        made = made.args[0]
    given = [torch.randn(batch, 8, queries, 16), *(torch.randn(batch, 2, keys, 16) for _ in "kv")]
    mask = torch.full((batch, 1, queries, keys), never)
    mask[..., ends[0] : ends[1]] = torch.randn(ends[1] - ends[0])
    mask[..., ends[0]] = never  # one more, unless it is the only one
    wide = [given[0].view(batch, 2, 4, queries, 16), *(x[:, :, None] for x in given[1:])]
    bias = mask[:, :, None].expand(batch, 2, 4, queries, keys)
    tensors = dict(zip((q.id, k.id, v.id, m.id), (*given, mask), strict=True))
    sizes = {"s0": batch, "s1": queries, "s2": keys}
    # A score near -65504 is a multiple of 1/128 in float32.
    tolerance = 2e-3 if ends[0] == ends[1] and never > -math.inf else 0.0
    assert check(made, tensors, sizes, [*wide, bias], tolerance) == (2 if processors == 16 else 1)
    if ends[0] == ends[1] and never > -math.inf:
        return
    unseen = torch.ones(keys, dtype=torch.bool)
    unseen[ends[0] // 64 * 64 : -(-ends[1] // 64) * 64] = False
    tensors[k.id], tensors[v.id] = (x.masked_fill(unseen[:, None], math.nan) for x in given[1:])
    check(made, tensors, sizes, [*wide, bias], tolerance)


def test_few_keys_are_all_read() -> None:
    b = IrBuilder()
    q = b.make("input", (), (B, 8, 1, 64), torch.float16, index=0)
    k, v = (b.make("input", (), (B, 8, S, 64), torch.float16, index=n) for n in (1, 2))
    m = b.make("input", (), (B, 1, 1, S), torch.float16, index=3)
    made = source(attend(b, q, k, v, b.broadcast(m, (B, 8, 1, S)), 0.1, hides=True))
    for batch, keys, finds in ((1, 4096, False), (2, 4096, True), (64, 1023, False)):
        found = attention(made, TARGET, SizeRelations()) or []
        [first, *_] = [x for x in found if holds(x, {"s0": batch, "s2": keys})]
        assert ("def find(" in first.choice.unit.text) is finds


@pytest.mark.parametrize(("heads", "axis", "count"), [(4, 1, 2), (2, 1, 1), (4, 4, 1)])
def test_a_bias_that_few_heads_share_is_read_once(heads: int, axis: int, count: int) -> None:
    b = IrBuilder()
    _, (q, k, v) = merged(b, heads, 16, torch.float16)
    bias = b.make("input", (), (B, axis, L, L), torch.float16, index=1)
    made = source(attend(b, q, k, v, b.broadcast(bias, (B, heads, L, L)), 0.25, hides=True))
    found = attention(made, TARGET, SizeRelations()) or []
    assert sum(holds(one, {"s0": 2, "s1": 1023}) for one in found) == 1
    assert sum(holds(one, {"s0": 2, "s1": 1024}) for one in found) == count


def test_a_softmax_that_is_written_out_reads_hidden_keys() -> None:
    b = IrBuilder()
    _, (q, k, v) = merged(b, 4, 16, torch.float16)
    bias = b.broadcast(b.make("input", (), (1, 1, L, L), torch.float16, index=1), (B, 4, L, L))
    for hides, count in ((True, 2), (False, 1)):
        made = source(attend(b, q, k, v, bias, 0.25, hides=hides))
        found = attention(made, TARGET, SizeRelations()) or []
        assert sum(holds(one, {"s0": 2, "s1": 1024}) for one in found) == count


def test_what_has_no_kernel_is_left_to_the_library() -> None:
    b = IrBuilder()
    for depth, dtype in ((512, torch.float16), (64, torch.float64)):
        _, (q, k, v) = merged(b, 1, depth, dtype)
        assert attention(source(attend(b, q, k, v, None, 1.0)), TARGET, SizeRelations()) is None

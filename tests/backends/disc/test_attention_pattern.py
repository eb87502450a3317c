# SPDX-License-Identifier: Apache-2.0
"""Attention written out in a model is found, whatever is done to the scores; what others read is left alone."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from disc_programs import legalized
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.mixed_precision import use_mixed_precision
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.passes.fuse_attention import find_attention
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = pytest.mark.needs("torch_mlir")
Function = Callable[..., object]
B, H, L, S, D = 2, 3, 5, 7, 8


def lowered(function: Function, given: list[torch.Tensor]) -> Graph:
    """IR of ``function`` with symbols for the batch and the lengths."""

    def is_dynamic(axis: int, size: int) -> bool:
        return size in (L, S) or (axis == 0 and size in (B, 8))

    dynamic = [[is_dynamic(k, n) for k, n in enumerate(x.shape)] for x in given]
    return lower(*trace(function, given, dynamic))


def ops(graph: Graph) -> list[str]:
    """Names of the ops after all passes."""
    return [v.op for v in legalized(graph).values]


def qkv(queries: int = L, keys: int = S) -> list[torch.Tensor]:
    return [torch.randn(B, n, H * D) for n in (queries, keys, keys)]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], H, D).transpose(1, 2)


def joined(y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], H * D)


def bert(q, k, v, mask):
    scores = heads(q) @ heads(k).transpose(-1, -2) / math.sqrt(D)
    return joined(F.dropout((scores + mask).softmax(-1), 0.1, training=False) @ heads(v))


def t5(q, k, v, bias):
    scores = torch.matmul(heads(q), heads(k).transpose(3, 2))
    scores = scores + bias
    return joined(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), heads(v)))


def gpt2(q, k, v, mask, allowed):
    scores = heads(q) @ heads(k).transpose(-1, -2) * 0.37
    scores = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
    return joined(scores.softmax(-1) @ heads(v))


def filled_with_infinity(q, k, v, mask, allowed):
    scores = heads(q) @ heads(k).transpose(-1, -2) * 0.37
    return joined(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ heads(v))


def scaled_queries(q, k, v, mask):
    q = heads(q * 0.25).reshape(-1, q.shape[1], D)
    k, v = (heads(x).reshape(-1, x.shape[1], D) for x in (k, v))
    weights = torch.bmm(q, k.transpose(1, 2))
    weights = weights.view(-1, H, q.shape[1], k.shape[1]) + mask
    weights = weights.view(-1, q.shape[1], k.shape[1]).softmax(-1)
    return joined(torch.bmm(weights, v).view(-1, H, q.shape[1], D))


def bloom(q, k, v, mask):
    q, k, v = (heads(x).reshape(-1, x.shape[1], D) for x in (q, k, v))
    alibi = torch.arange(k.shape[1]).float().expand(q.shape[0], 1, k.shape[1])
    weights = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3)
    weights = (weights.view(-1, H, q.shape[1], k.shape[1]) + mask).softmax(-1)
    weights = weights.view(-1, q.shape[1], k.shape[1])
    return joined(torch.bmm(weights, v).view(-1, H, q.shape[1], D))


def two_biases(q, k, v, mask, allowed):
    per_head = torch.arange(H).float().view(1, H, 1, 1)
    scores = heads(q) @ heads(k).transpose(-1, -2) + per_head * allowed
    return joined((scores - mask).softmax(-1) @ heads(v))


def gemma2(q, k, v, mask):
    scores = heads(q) @ heads(k).transpose(2, 3) * 0.3
    scores = torch.tanh(scores / 2.0) * 2.0 + mask
    return joined(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ heads(v))


def capped_and_filled(q, k, v, mask, allowed):
    scores = (heads(q) @ heads(k).mT).tanh() * -0.5 * 4
    return joined(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ heads(v))


def mpt(q, k, v, mask, allowed):
    scores = heads(q) @ heads(k).mT * 0.3 + torch.arange(H).float().view(H, 1, 1) * mask
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return joined(F.softmax(scores.float(), dim=-1).to(v.dtype) @ heads(v))


def biased_and_filled_with_infinity(q, k, v, bias, allowed):
    scores = torch.where(allowed, heads(q) @ heads(k).mT + bias, -math.inf)
    return joined(scores.softmax(-1) @ heads(v))


def swin_v2(q, k, v, mask):
    scale = torch.arange(1, H + 1).to(q.dtype).view(H, 1, 1) / 4
    scores = heads(q) @ heads(k).mT * scale
    return joined((scores + mask).softmax(-1) @ heads(v))


def gpt_oss(q, k, v, mask):
    scores = heads(q) @ heads(k).mT * 0.3 + mask
    sinks = torch.arange(H).to(q.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], -1)
    scores = torch.cat([scores, sinks], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return joined(scores.softmax(-1, dtype=scores.dtype)[..., :-1] @ heads(v))


def sinks_of_products_of_one_batch(q, k, v, mask, sinks):
    parts = [heads(x).reshape(-1, x.shape[1], D) for x in (q, k, v)]
    scores = torch.bmm(parts[0], parts[1].mT).view(q.shape[0], H, q.shape[1], k.shape[1]) + mask
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :-1].reshape(-1, q.shape[1], k.shape[1])
    return joined(torch.bmm(weights, parts[2]).view(q.shape[0], H, q.shape[1], D))


def temperature_of_products_of_one_batch(q, k, v, mask):
    """OmniSR's attention of channels."""
    parts = [heads(x).reshape(-1, x.shape[1], D) for x in (q, k, v)]
    scores = torch.bmm(parts[0], parts[1].mT).view(q.shape[0], H, q.shape[1], k.shape[1])
    scores = (scores * torch.arange(1, H + 1).view(H, 1, 1)).softmax(-1)
    weights = scores.view(-1, q.shape[1], k.shape[1])
    return joined(torch.bmm(weights, parts[2]).view(q.shape[0], H, q.shape[1], D))


def einsums(q, k, v, mask):
    """As torch.compile decomposes them: products of one batch, with axes of size 1 that move."""
    q, k, v = (heads(x) for x in (q, k, v))
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3 + mask
    return torch.einsum("b h i j, b h j d -> b i h d", scores.softmax(-1), v).flatten(2)


MASK = torch.randn(B, 1, 1, S)
ALLOWED = torch.rand(B, 1, L, S) < 0.7
ALLOWED[..., 0] = True
FOUND: dict[Function, list[torch.Tensor]] = {
    bert: [MASK],
    t5: [torch.randn(1, H, L, S)],
    gpt2: [MASK, ALLOWED],
    filled_with_infinity: [MASK, ALLOWED],
    scaled_queries: [MASK],
    bloom: [MASK],
    two_biases: [MASK, ALLOWED],
    gemma2: [MASK],
    capped_and_filled: [MASK, ALLOWED],
    mpt: [MASK, ALLOWED],
    biased_and_filled_with_infinity: [torch.randn(1, H, L, S), ALLOWED],
    swin_v2: [MASK],
    temperature_of_products_of_one_batch: [MASK],
    gpt_oss: [MASK],
    einsums: [MASK],
    sinks_of_products_of_one_batch: [MASK, torch.tensor([-math.inf, 30.0, -30.0])],
}


def check(function: Function, given: list[torch.Tensor], graph: Graph) -> None:
    compiled = compile_ir(graph, host())
    engine = make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)
    found = engine.try_execute(given) or pytest.fail(engine.last_error())
    wanted = function(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_found(function: Function) -> None:
    given = [*qkv(), *FOUND[function]]
    graph = lowered(function, given)
    names = ops(graph)
    assert names.count("attention") == 1, names
    assert "matmul" not in names and "exp" not in names and "reduce" not in names
    check(function, given, graph)


@pytest.mark.parametrize("batch", [1, 2])
def test_einsums_of_known_sizes_read_queries_and_keys_in_place(batch: int) -> None:
    given = [torch.randn(batch, 16, H * D) for _ in range(3)] + [torch.randn(16, 16)]
    graph = lower(*trace(einsums, given, [[False] * x.dim() for x in given]))
    names = ops(graph)
    assert names.count("attention") == 1 and "matmul" not in names
    assert "cast" not in names, names  # copies
    check(einsums, given, graph)


def llama(q, k, v, mask):
    scores = heads(q) @ heads(k).transpose(2, 3) * 0.3 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return joined(weights @ heads(v))


def in_float32(q, k, v, mask, allowed):
    """As torch.compile writes FlexAttention with a bias: a row that sees no key is 0."""
    scores = (heads(q) @ heads(k).mT).float() * 0.3 + torch.arange(H).view(H, 1, 1) * mask.float()
    weights = torch.ops.aten._safe_softmax(scores, -1).to(q.dtype)
    return joined(weights @ heads(v))


def filled_in_float32(q, k, v, mask, allowed):
    scores = (heads(q) @ heads(k).mT).float() * 0.3
    lowest = torch.finfo(torch.float32).min
    return joined(scores.masked_fill(~allowed, lowest).softmax(-1).type_as(v) @ heads(v))


def safely_filled(q, k, v, mask, allowed):
    scores = (heads(q) @ heads(k).mT).float() * 0.3
    weights = torch.ops.aten._safe_softmax(scores.masked_fill(~allowed, -math.inf), -1)
    return joined(weights.type_as(v) @ heads(v))


SEEN_BY_SOME = ALLOWED.clone()
SEEN_BY_SOME[:, :, 2] = False
NARROW: dict[Function, list[torch.Tensor]] = {
    t5: [torch.randn(1, H, L, S)],
    llama: [MASK],
    in_float32: [torch.where(SEEN_BY_SOME, MASK, -math.inf), ALLOWED],
    filled_in_float32: [MASK, SEEN_BY_SOME],
    safely_filled: [MASK, SEEN_BY_SOME],
    gemma2: [MASK],
    mpt: [MASK, SEEN_BY_SOME],
    swin_v2: [MASK],
    gpt_oss: [MASK],
}


@pytest.mark.parametrize("function", NARROW, ids=lambda f: f.__name__)
def test_found_where_the_softmax_is_in_float32(function: Function) -> None:
    """Scores of the engine are not rounded to 16 bits, which is nearer to what is asked for."""
    dtype = torch.bfloat16
    given = [x.to(dtype) if x.is_floating_point() else x for x in (*qkv(), *NARROW[function])]
    graph = lowered(function, given)
    names = ops(graph)
    assert names.count("attention") == 1, names
    assert "matmul" not in names and "exp" not in names and "reduce" not in names
    compiled = compile_ir(graph, host())
    engine = make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)
    [found] = engine.try_execute(given) or pytest.fail(engine.last_error())
    want = function(*[x.float() if x.is_floating_point() else x for x in given])
    assert isinstance(want, torch.Tensor) and found.dtype == dtype
    torch.testing.assert_close(found.float(), want, rtol=0, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(
    "function", [gpt2, mpt, filled_with_infinity, gpt_oss], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_filled_in_the_mixed_precision_of_a_gpu(function: Function, dtype: torch.dtype) -> None:
    """The lowest float32 is none of float16; a query that sees nothing weighs all keys alike, or is NaN."""
    given = [*qkv(), MASK] if function is gpt_oss else [*qkv(), MASK, SEEN_BY_SOME]
    graph = use_mixed_precision(find_attention(lowered(function, given)), dtype)
    assert "attention" in [v.op for v in graph.values]
    [found] = interpret(graph, given)
    torch.testing.assert_close(found, function(*given), rtol=0, atol=3e-2, equal_nan=True)


def test_returned_as_it_is() -> None:
    """With torch's strides, and nothing copied."""

    def function(q, k, v):
        return (heads(q) @ heads(k).mT).softmax(-1) @ heads(v)

    given = qkv()
    graph = lowered(function, given)
    assert "attention" in ops(graph) and "cast" not in ops(graph)
    compiled = compile_ir(graph, host())
    engine = make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)
    [found] = engine.try_execute(given) or pytest.fail(engine.last_error())
    want = function(*given)
    assert found.stride() == want.stride()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_windows_divide_the_batch_in_another_way() -> None:
    """Swin: a bias per head, and a mask per window of the image."""
    windows = 4

    def swin(q, k, v, bias, mask):
        scores = heads(q) @ heads(k).transpose(-1, -2) * 0.25 + bias
        length = q.shape[1]
        scores = scores.view(-1, windows, H, length, length) + mask[None, :, None]
        weights = scores.view(-1, H, length, length).softmax(-1)
        return joined(weights @ heads(v))

    given = [torch.randn(8, 9, H * D) for _ in range(3)]
    given += [torch.randn(H, 9, 9), torch.randn(windows, 9, 9)]
    graph = lowered(swin, given)
    names = ops(graph)
    assert names.count("attention") == 1 and "exp" not in names
    check(swin, given, graph)


def test_rows_that_are_masked_everywhere() -> None:
    """-inf everywhere is NaN where the softmax is written out; the lowest number is an even average."""
    allowed = ALLOWED.clone()
    allowed[:, :, 2] = False
    for function in (gpt2, mpt, filled_with_infinity, biased_and_filled_with_infinity):
        given = [*qkv(), MASK, allowed]
        check(function, given, lowered(function, given))
        found = function(*given)
        assert isinstance(found, torch.Tensor)
        assert found[:, 2].isnan().all() == (function.__name__.endswith("infinity"))


@pytest.mark.parametrize("function", [gpt2, mpt, capped_and_filled], ids=lambda f: f.__name__)
def test_filling_hides_what_was_there(function: Function) -> None:
    """NaN in a key that is filled over does not reach the result."""
    allowed = torch.ones(B, 1, L, S, dtype=torch.bool)
    allowed[..., 3] = False
    given = [*qkv(), MASK, allowed]
    given[1][:, 3] = math.nan
    want = function(*given)
    assert isinstance(want, torch.Tensor) and not want.isnan().any()
    check(function, given, lowered(function, given))


@pytest.mark.parametrize("number", [0.0, -3.0, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_filled_with_another_number_than_a_mask(number: float, biased: bool) -> None:
    """A bias may hold it elsewhere, where it is added; 0 is what keeps a score."""

    def function(q, k, v, mask, allowed):
        scores = heads(q) @ heads(k).mT
        scores = torch.where(allowed, scores + mask if biased else scores, number)
        return joined(scores.softmax(-1) @ heads(v))

    given = [*qkv(), MASK, ALLOWED]
    graph = lowered(function, given)
    assert ("attention" in ops(graph)) == (number != 0 and not biased)
    check(function, given, graph)


@pytest.mark.parametrize("kind", ["boolean", "zeros", "written out"])
def test_a_mask_that_hides_nothing_is_none(kind: str) -> None:
    """transformers make one of positions where a model has none."""

    def everything(q, k, v):
        seen = (torch.arange(k.shape[1])[None, None, None] >= 0).expand(B, 1, q.shape[1], -1)
        if kind == "written out":
            scores = heads(q) @ heads(k).transpose(-1, -2)
            return joined(scores.masked_fill(~seen, -math.inf).softmax(-1) @ heads(v))
        mask = seen if kind == "boolean" else torch.zeros(q.shape[1], k.shape[1])
        return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), mask))

    given = qkv()
    graph = legalized(lowered(everything, given))
    [found] = [v for v in graph.values if v.op == "attention"]
    assert len(found.args) == 3
    check(everything, given, lowered(everything, given))


def test_repeated_heads_are_not_repeated() -> None:
    """Llama: keys and values of a few heads, expanded and reshaped for groups of queries."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        batch, few, length, depth = x.shape
        return x[:, :, None].expand(batch, few, 3, length, depth).reshape(batch, 6, length, depth)

    def eager(q, k, v):
        scores = q @ repeat(k).transpose(2, 3) * 0.3
        return (scores.softmax(-1) @ repeat(v)).transpose(1, 2).reshape(q.shape[0], -1, 6 * D)

    def fused(q, k, v):
        y = F.scaled_dot_product_attention(q, repeat(k), repeat(v))
        return y.transpose(1, 2).reshape(q.shape[0], -1, 6 * D)

    given = [torch.randn(6, n, m, D) for n, m in ((6, L), (2, S), (2, S))]
    for function in (eager, fused):
        graph = lowered(function, given)
        names = ops(graph)
        assert names.count("attention") == 1 and "cast" not in names, names
        check(function, given, graph)


def returns_weights(q, k, v):
    weights = (heads(q) @ heads(k).transpose(-1, -2)).softmax(-1)
    return joined(weights @ heads(v)), weights


def reads_scores(q, k, v):
    scores = heads(q) @ heads(k).transpose(-1, -2)
    return joined(scores.softmax(-1) @ heads(v)) * scores.amax()


def over_queries(q, k, v):
    return joined((heads(q) @ heads(k).transpose(-1, -2)).softmax(-2) @ heads(v))


def scaled_by_key(q, k, v):
    scale = torch.arange(1, k.shape[1] + 1).float()
    return joined((heads(q) @ heads(k).transpose(-1, -2) * scale).softmax(-1) @ heads(v))


def scaled_after_a_bias(q, k, v):
    scale = torch.arange(1, H + 1).float().view(H, 1, 1)
    scores = heads(q) @ heads(k).transpose(-1, -2) + torch.arange(k.shape[1])
    return joined((scores * scale).softmax(-1) @ heads(v))


def sink_with_a_value(q, k, v):
    scores = heads(q) @ heads(k).mT
    scores = torch.cat([scores[..., :1], scores], -1)
    return joined(scores.softmax(-1)[..., :-1] @ heads(v))


def sink_of_another_dtype(q, k, v):
    scores = (heads(q) @ heads(k).mT).bfloat16()
    sinks = torch.zeros(1, dtype=torch.bfloat16).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).float().softmax(-1)[..., :-1]
    return joined(weights @ heads(v))


def last_key_left_out(q, k, v):
    scores = heads(q) @ heads(k).mT
    return joined(scores.softmax(-1)[..., :-1] @ heads(v)[:, :, 1:])


def capped_twice(q, k, v):
    return joined((heads(q) @ heads(k).mT).tanh().mul(3).tanh().softmax(-1) @ heads(v))


@pytest.mark.parametrize(
    "function",
    [
        returns_weights,
        reads_scores,
        over_queries,
        scaled_by_key,
        scaled_after_a_bias,
        sink_with_a_value,
        sink_of_another_dtype,
        last_key_left_out,
        capped_twice,
    ],
    ids=lambda f: f.__name__,
)
def test_left_alone(function: Function) -> None:
    given = qkv()
    graph = lowered(function, given)
    assert "attention" not in ops(graph)
    check(function, given, graph)


def test_float64_is_left_alone() -> None:
    def function(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    given = [x.double() for x in qkv()]
    graph = lowered(function, given)
    assert "attention" not in ops(graph)
    check(function, given, graph)

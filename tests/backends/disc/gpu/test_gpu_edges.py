# SPDX-License-Identifier: Apache-2.0
"""Programs for a GPU at the edges: rows of no and of very many elements, views that begin anywhere, masks of
every form, integers that divide by negative ones, scalars, infinities; against eager torch.

Every fifth of them; all take some minutes: BLADE_OP_SAMPLES=all pytest ...
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from interpreted_models import ours_alone
from op_compare import different
from op_trace import trace
from run_program import GuardFailed, compile_to_program
from torch.nn import functional

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Tensors = list[torch.Tensor]
attention = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Edge:
    """``function`` of ``inputs(*size)``, compiled at the first of ``sizes``. ``static``: inputs of known sizes; axes
    of a size of 1 are known, too, where ``ones`` says so.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[..., Tensors]
    sizes: Sequence[tuple[int, ...]]
    static: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()  # axes of the first input that are known
    ones: bool = False


def normal(*size: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def whole(*size: int, dtype: torch.dtype, most: int = 100) -> torch.Tensor:
    return torch.randint(0 if dtype == torch.uint8 else -most, most + 1, size).to(dtype)


def not_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _arithmetic(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    floor, trunc = (torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc"))
    rests = [floor, trunc, torch.remainder(x, y), torch.fmod(x, y)]
    bits = [x & y, x ^ y, x > y, torch.maximum(x, y), x + y, x * y, x.clamp(1, 3)]
    return [*rests, *bits, x.sum(-1), x.amax(-1), x.float().mean(-1), x / y]


def _sums(x: torch.Tensor) -> Tensors:
    return [x.sum(), x.prod(-1), x.amin(0), x.argmax(-1), x.cumsum(-1), x.any(), x.all(-1)]


def _infinite(x: torch.Tensor) -> Tensors:
    kept = [x.nan_to_num(), x.isnan(), x.isinf(), torch.where(x > 0, x.log(), x), x.sign()]
    return [*kept, x.logsumexp(-1), x.softmax(-1), x.amax(-1)]


def _infinities(*size: int) -> Tensors:
    x, y = normal(*size), normal(*size)
    return [torch.where(x > 1, torch.inf, torch.where(y > 1, torch.nan, x))]


def _masked(kind: str, depth: int, dtype: torch.dtype, b: int, h: int, q: int, k: int) -> Tensors:
    k = q if kind == "causal" else k
    query = normal(b, h, q, depth, dtype=dtype)
    keys = [normal(b, h, k, depth, dtype=dtype) for _ in range(2)]
    never = torch.where(torch.rand(b, 1, q, 1) > 0.5, 0.0, -torch.inf)
    masks = {
        "bool of keys": lambda: torch.rand(b, 1, 1, k) > 0.3,
        "bool of all": lambda: torch.rand(b, 1, q, k) > 0.3,
        "bias of heads": lambda: normal(h, q, k, dtype=dtype),
        "bias of keys": lambda: normal(b, 1, 1, k, dtype=dtype),
        "queries that see nothing": lambda: never.to(dtype).expand(b, 1, q, k).contiguous(),
    }
    return [query, *keys, *([masks[kind]()] if kind in masks else [])]


def _attend(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: Any) -> Any:
    return attention(q, k, v, *mask, is_causal=kind == "causal")


def _merged(x: torch.Tensor) -> torch.Tensor:
    heads = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in x.chunk(3, -1))
    return attention(*heads)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return attention(*(x[:, :, 1:, k : k + 40] for k in (0, 40, 80)))


def _of_floats(d: torch.dtype) -> list[Edge]:
    def draw(*size: int) -> Tensors:
        return [normal(*size, dtype=d)]

    def products(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        linear = functional.linear
        return [linear(x[:, 3:], w[:, 3:]), linear(x[1:, :-3], w[:, :-3]).relu()]

    def expanded(a: int, b: int) -> Tensors:
        return [t.expand(a, b) for t in (normal(a, 1, dtype=d), normal(1, b, dtype=d))]

    def reductions(x: torch.Tensor) -> Tensors:
        return [x.amax(-1), x.softmax(-1), x.mean(-1)]

    def known(x: torch.Tensor) -> Tensors:
        return [x.softmax(-1), functional.layer_norm(x, x.shape[-1:])]

    return [
        Edge(
            "rows of nothing",
            lambda x: (x.sum(-1), x.prod(-1), x.relu()),
            lambda a: draw(a, 0),
            [(3,), (0,), (1,)],
            fixed=(1,),
        ),
        Edge("long rows", reductions, draw, [(2, 70001), (1, 131072), (3, 16385), (1, 1)]),
        Edge("known long rows", known, lambda a: draw(a, 70001), [(2,), (1,)], fixed=(1,)),
        Edge(
            "sums of columns",
            lambda x: (x.sum(0), x.mean(1)),
            draw,
            [(2, 300, 5), (1, 1, 1), (70, 2, 3), (3, 700, 2), (0, 3, 2), (2, 0, 3)],
        ),
        Edge(
            "products of slices",
            products,
            lambda a: [normal(a, 67, dtype=d), normal(24, 67, dtype=d)],
            [(5,), (2,), (1,), (33,)],
            static=(1,),
            fixed=(1,),
        ),
        Edge(
            "attention of slices",
            _sliced,
            lambda b, h, n: draw(b, h, n, 121),
            [(2, 2, 9), (1, 1, 2), (3, 1, 70), (2, 2, 1)],
        ),
        Edge(
            "attention of a merged product",
            _merged,
            lambda b, n: draw(b, n, 72),
            [(2, 9), (1, 1), (3, 70)],
        ),
        Edge(
            "expanded", lambda x, y: (x + y, (x * y).sum(-1)), expanded, [(3, 5), (1, 1), (7, 37)]
        ),
        Edge(
            "transposed",
            lambda x: (x.softmax(-1), x + 1),
            lambda a, b: [normal(b, a, dtype=d).t()],
            [(3, 5), (1, 1), (65, 37)],
        ),
        *(
            Edge(
                f"attention, {kind}, depth {depth}",
                partial(_attend, kind),
                partial(_masked, kind, depth, d),
                [(2, 2, 5, 7), (1, 1, 1, 1), (1, 3, 37, 13), (2, 2, 70, 129), (1, 2, 33, 1)],
                ones=True,
            )
            for kind in MASKS
            for depth in ((8, 40, 80, 128) if d == F16 else (40, 128))
        ),
    ]


MASKS = (
    "nothing",
    "causal",
    "bool of keys",
    "bool of all",
    "bias of heads",
    "bias of keys",
    "queries that see nothing",
)


def _of_ints(d: torch.dtype) -> list[Edge]:
    return [
        Edge(
            "arithmetic",
            _arithmetic,
            lambda a, b: [whole(a, b, dtype=d), not_zero(whole(a, b, dtype=d, most=9))],
            [(3, 5), (1, 1), (7, 37), (0, 5)],
        ),
        Edge(
            "reductions",
            _sums,
            lambda a, b: [whole(a, b, dtype=d)],
            [(3, 5), (1, 1), (7, 37), (2, 5000)],
        ),
    ]


def _images(*size: int) -> Tensors:
    return [normal(*size, dtype=F16)]


def _norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.silu(functional.group_norm(x, 4, w, b))


def _convolved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, w, b, stride=(2, 1), padding=(1, 0)).relu()


OTHERS = [
    Edge(
        "bools",
        lambda x, y: (x & y, x | ~y, x.sum(-1), x.any(-1), x.all(0), x ^ y, x.float() + y),
        lambda a, b: [normal(a, b) > 0, normal(a, b) > 0],
        [(3, 5), (1, 1), (7, 300), (0, 3)],
    ),
    Edge(
        "scalars",
        lambda x, y: (x + y, x * 2, (y * x).sum(), torch.where(x > 0, y, x)),
        lambda a: [normal(), normal(a)],
        [(3,), (1,), (1000,), (0,)],
    ),
    Edge("scalars alone", lambda x, y: (x + y, x.exp()), lambda: [normal(), normal()], [()]),
    Edge("infinities", _infinite, _infinities, [(3, 5), (1, 1), (7, 37)]),
    Edge(
        "doubles",
        lambda x: (x.softmax(-1), x.sum(), x.exp() / 3),
        lambda a, b: [normal(a, b, dtype=torch.float64)],
        [(3, 5), (1, 1), (2, 5000)],
    ),
    Edge(
        "group norm",
        _norm,
        lambda n, h, w: [normal(n, 16, h, w, dtype=F16), *(normal(16, dtype=F16) for _ in "ab")],
        [(2, 5, 7), (1, 1, 1), (3, 37, 2), (1, 150, 150)],
        static=(1, 2),
        fixed=(1,),
    ),
    Edge(
        "pools",
        lambda x: (functional.max_pool2d(x, 3, 2, 1), functional.max_pool2d(x, 2, ceil_mode=True)),
        _images,
        [(2, 3, 9, 8), (1, 1, 2, 3), (3, 5, 37, 11)],
    ),
    Edge(
        "a pool of channels that lie last",
        lambda x: functional.max_pool2d(x, 3, 2, 1) + 1,
        lambda n, h, w: [normal(n, 32, h, w, dtype=F16).to(memory_format=torch.channels_last)],
        [(2, 9, 8), (1, 1, 1), (3, 37, 11)],
        fixed=(1,),
    ),
    Edge(
        "a convolution that steps along one axis",
        _convolved,
        lambda n, h, w: [
            normal(n, 32, h, w, dtype=F16),
            normal(24, 32, 3, 2, dtype=F16),
            normal(24, dtype=F16),
        ],
        [(2, 9, 8), (1, 1, 2), (3, 37, 11), (1, 70, 65)],
        static=(1, 2),
        fixed=(1,),
    ),
    Edge(
        "a concatenation of views",
        lambda x, y: torch.cat([x[:, 1:], y, x.flip(1)[:, :2]], 1).softmax(-1),
        lambda a, b: [normal(a, b), normal(a, 3)],
        [(3, 5), (1, 2), (7, 37)],
    ),
    Edge(
        "many results",
        lambda x: tuple(x + k for k in range(40)),
        lambda a: [normal(a)],
        [(7,), (1,), (0,)],
    ),
    Edge(
        "many inputs",
        lambda *xs: sum(xs[1:], xs[0]),
        lambda a: [normal(a) for _ in range(60)],
        [(7,), (1,)],
    ),
]
EDGES = [
    *(
        pytest.param(edge, id=f"{edge.name}-{d}")
        for d in (F16, F32, BF16)
        for edge in _of_floats(d)
    ),
    *(pytest.param(edge, id=f"{edge.name}-{d}") for d in INTS for edge in _of_ints(d)),
    *(pytest.param(edge, id=edge.name) for edge in OTHERS),
]
if os.environ.get("BLADE_OP_SAMPLES") != "all":
    EDGES = EDGES[::5]


@pytest.mark.parametrize("edge", EDGES)
def test_a_program_at_the_edge_answers_like_eager(edge: Edge) -> None:
    torch.manual_seed(0)
    samples = edge.inputs(*edge.sizes[0])
    dynamic = [
        [
            not (k in edge.static or (k == 0 and a in edge.fixed) or (edge.ones and n == 1))
            for a, n in enumerate(x.shape)
        ]
        for k, x in enumerate(samples)
    ]
    gm, shape_env = trace(edge.function, samples, dynamic)
    with ours_alone(True):
        program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    for size in edge.sizes:
        given = edge.inputs(*size)
        want = _listed(edge.function(*given))
        try:
            got = program(*given)
        except GuardFailed:
            assert size != edge.sizes[0]
            continue
        wide = [t.double() if t.is_floating_point() else t for t in given]
        assert not (text := different(got, want, _listed(edge.function(*wide)))), f"{size}: {text}"


def _listed(results: Any) -> Tensors:
    return list(results) if isinstance(results, (tuple, list)) else [results]

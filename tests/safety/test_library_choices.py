# SPDX-License-Identifier: Apache-2.0
"""An engine made for a batch of 4 serves batches of 1 to 256: torch's choice of a library is no guard.

torch asks of a convolution whether its batch is below 16, whether its input is large, which of two memory orders
it has, and of ``cdist`` whether a side has more than 25 rows. None of this changes what comes out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic

import blade
from blade.config import Config
from blade.graph.fx.writer import FxWriter, writing

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

CONFIG = Config(
    optimization_pipeline="DISC", timing=False, min_cluster_size=1, cache=False, strict=True
)
EVERY = range(1, 257)
SOME = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256)


class Of(nn.Module):
    """A function as a model, with weights of its own where it wants some."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = [f"w{k}" for k in range(len(weights))]
        for name, weight in zip(self.names, weights, strict=True):
            self.register_buffer(name, weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *(getattr(self, name) for name in self.names))


class Side(nn.Module):
    """Models side by side, of one tensor."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(model(x) for model in self.models)


def of(function: Callable[..., Any], *sizes: tuple[int, ...]) -> nn.Module:
    return Of(function, *map(torch.randn, sizes))


def attention(x: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, **how)


# One row per family of the op table: its models, and the sizes of one element of their batch.
FAMILIES: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "pointwise": (
        lambda: [
            of(lambda x: torch.tanh(x) * 2 + x.sigmoid()),
            of(lambda x, w: x * w + 1, (6,)),
            of(lambda x: torch.where(x > 0, x, x.exp())),
        ],
        (6,),
    ),
    "reductions": (
        lambda: [
            of(lambda x: x.sum(-1) + x.amax(-1)),
            of(lambda x: x.mean(0)),
            of(lambda x: x.softmax(-1)),
            of(lambda x: x.cumsum(-1)),
            of(lambda x: x.argmax(-1)),
            of(lambda x: x.topk(2, -1)[0]),
        ],
        (6,),
    ),
    "normalization": (
        lambda: [nn.LayerNorm(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)],
        (4, 3, 4),
    ),
    "products": (
        lambda: [
            nn.Linear(6, 5),
            of(lambda x: x @ x.transpose(-1, -2)),
            of(torch.matmul, (6, 4)),
            of(lambda x, w: torch.einsum("bij,jk->bik", x, w), (6, 4)),
        ],
        (5, 6),
    ),
    "conv2d": (lambda: [nn.Conv2d(3, 4, 3)], (3, 7, 7)),
    "conv2d without bias": (lambda: [nn.Conv2d(3, 4, 3, bias=False)], (3, 7, 7)),
    "conv2d of one pixel": (lambda: [nn.Conv2d(3, 4, 1)], (3, 1, 1)),
    "conv2d of many kinds": (
        lambda: [
            nn.Conv2d(4, 3, 1),
            nn.Conv2d(4, 3, 3, stride=2, padding=1),
            nn.Conv2d(4, 3, 3, dilation=2),
            nn.Conv2d(4, 4, 3, groups=2),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.Conv2d(4, 3, 3, padding="same"),
            nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
        ],
        (4, 7, 7),
    ),
    "conv1d": (
        lambda: [
            nn.Conv1d(3, 4, 3),
            nn.Conv1d(3, 4, 3, bias=False),
            nn.Conv1d(3, 3, 3, groups=3),
            nn.ConvTranspose1d(3, 4, 3),
        ],
        (3, 9),
    ),
    "conv3d": (lambda: [nn.Conv3d(2, 3, 2), nn.ConvTranspose3d(2, 3, 2)], (2, 4, 4, 4)),
    "conv_transpose2d": (
        lambda: [nn.ConvTranspose2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3, stride=2, bias=False)],
        (3, 4, 4),
    ),
    "convolutions in a row": (
        lambda: [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))],
        (3, 6, 6),
    ),
    "pooling": (
        lambda: [nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(2)],
        (3, 6, 6),
    ),
    "attention": (lambda: [of(attention), of(partial(attention, is_causal=True))], (2, 5, 8)),
    "embedding": (
        lambda: [of(lambda x, w: F.embedding((x.abs() * 3).long() % 7, w), (7, 4))],
        (6,),
    ),
    "views": (
        lambda: [
            of(lambda x: x.flatten(1).unflatten(1, (3, 4)).transpose(1, 2) + 1),
            of(lambda x: x[:, 1:] * 2),
            of(lambda x: torch.cat([x, x * 2], 1)),
            of(lambda x: torch.cat([x, x * 2])),
            of(lambda x: x.gather(1, x.argsort(1))),
        ],
        (2, 6),
    ),
    "images": (
        lambda: [
            of(lambda x: F.interpolate(x, scale_factor=2.0)),
            of(lambda x: F.interpolate(x, size=(7, 5), mode="bilinear")),
            of(lambda x: F.pad(x, (1, 2), value=0.5)),
            of(lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect")),
            of(lambda x: F.unfold(x, 2)),
            of(lambda x: F.pixel_shuffle(x, 2)),
        ],
        (4, 4, 4),
    ),
    "cdist": (lambda: [of(torch.cdist, (9, 6))], (6,)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_batch_is_served(family: str) -> None:
    make, element = FAMILIES[family]
    model = Side(*make()).eval()
    optimized = blade.optimize(model, torch.randn(4, *element), CONFIG)
    batches = EVERY if family in ("conv2d", "cdist") else SOME
    for batch in batches:
        assert_same(optimized, model, torch.randn(batch, *element))
    assert blade.report(optimized).clusters
    for counters in blade.stats(optimized).values():
        assert (counters["engine_runs"], counters["fallbacks"]) == (len(batches), 0)


@pytest.mark.parametrize("sample", [1, 2, 40])
def test_the_sample_chooses_nothing(sample: int) -> None:
    """Batches of 1, of 2 to 15 and from 16 are computed by different libraries in torch."""
    model = Side(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3)).eval()
    samples = [torch.randn(sample, 3, 7, 7), torch.randn(sample + 1, 3, 7, 7)]
    optimized = blade.optimize(model, samples, CONFIG)
    for batch in SOME:
        assert_same(optimized, model, torch.randn(batch, 3, 7, 7))
    for counters in blade.stats(optimized).values():
        assert (counters["engine_runs"], counters["fallbacks"]) == (len(SOME), 0)


def test_what_is_cut_after_a_convolution_is_cut() -> None:
    """The library's bound, 15 at most, must not tell a slice of 20 rows that it takes all."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), of(lambda x: x[:20] + 1)).eval()
    optimized = blade.optimize(model, torch.randn(4, 3, 7, 7), CONFIG)
    for batch in (4, 19, 20, 21, 64):
        assert_same(optimized, model, torch.randn(batch, 3, 7, 7))


def test_sizes_that_a_convolution_needs_stay_guards() -> None:
    """Channels that do not match and images below the kernel go to the original, which raises."""
    model = nn.Conv2d(3, 4, 3).eval()
    optimized = blade.optimize(model, torch.randn(4, 3, 7, 7), CONFIG)
    for sizes in ((4, 5, 7, 7), (4, 3, 2, 7), (20, 3, 7, 2)):
        with pytest.raises(RuntimeError):
            optimized(torch.randn(sizes))
    [counters] = blade.stats(optimized).values()
    assert (counters["engine_runs"], counters["guard_shape"]) == (0, 3)


def test_a_graph_of_torch_compile_relies_on_no_library() -> None:
    """What Dynamo asks is its own; a cluster that is cut out of its graph has these guards alone."""
    model = nn.Conv2d(3, 4, 3)
    with writing():
        writer = FxWriter()
        x = writer.place("x0", torch.randn(4, 3, 7, 7), [DimDynamic.DYNAMIC] * 4, "x")
        w, b = (writer.hold(k, t.detach(), "w") for k, t in enumerate((model.weight, model.bias)))
        ones = [1, 1]
        args = (x, w, b, ones, [0, 0], ones, False, [0, 0], 1)
        y = writer.emit(torch.ops.aten.convolution.default, args, {}, "y")
        writer.emit(
            torch.ops.aten.convolution_backward.default,
            (y, x, w, [4], ones, [0, 0], ones, False, [0, 0], 1, [True, True, True]),
            {},
            "g",
        )
    batch, *_ = x.meta["val"].shape
    asked = {s for guard in writer.shape_env.guards for s in guard.expr.free_symbols}
    assert asked
    assert batch.node.expr not in asked
    assert writer.shape_env.bound_sympy(batch.node.expr).upper > 10**6


def assert_same(optimized: Any, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        found, expected = optimized(x), model(x)
    torch.testing.assert_close(found, expected, msg=lambda text: f"batch {len(x)}: {text}")

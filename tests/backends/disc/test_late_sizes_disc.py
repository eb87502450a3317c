# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on elements stay inside one engine: its answers at contents that select none, one and all."""

import importlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import selections
import torch
from cutting import Plain, script, trace
from selections import SAMPLE, Sample, cut_of, every

import blade
from blade.backends.disc.backend import DiscBackend
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.reference.interpret_graph import interpret
from blade.config import Config
from blade.core.reason import Code
from blade.graph.torchscript.view import view

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


def check(
    function: Callable[..., Any], samples: list[Sample], how: Any = trace, declines: int = 0
) -> Any:
    """Trace ``function`` at the first sample, and compare its engine and the interpreter at all of them."""
    module = function if isinstance(function, torch.nn.Module) else Plain(function)
    cut = cut_of(how(module, *samples))
    engine: Any = DiscBackend().convert(cut.cluster, Config())
    assert not engine.why_unavailable(), engine.why_unavailable()
    graph = lower(cut.cluster.gm, cut.cluster.shape_env)
    for inputs in (*cut.samples, *cut.probes):
        want = cut.fallback(*inputs)
        want = [want] if isinstance(want, torch.Tensor) else list(want)
        got = engine.try_execute(list(inputs))
        if got is None:
            declines -= 1
            continue
        for answer in (got, interpret(graph, inputs)):
            for a, b in zip(answer, want, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, equal_nan=True)
    assert declines == 0, engine.last_error() or engine.stats()
    assert not engine.last_error()
    return engine


@pytest.mark.parametrize("function", selections.ALL)
def test_sizes_that_a_trace_has(function: Callable[..., Any]) -> None:
    samples = every()
    if function is selections.of_a_mask:
        samples.append((SAMPLE[:, :1],))
    check(function, samples)


def of_equal_forms(x: torch.Tensor) -> torch.Tensor:
    """Two masks, and two numbers, that look alike to a fake tensor, which remembers what it selects."""
    a, b = x * 0.9, x * 0.7
    few, many = a[a > 0.5], b[b > 0.5]
    zeros = torch.zeros(int((a > 0.5).sum()) + 1, int((b > 0.5).sum()) + 2)
    return zeros + torch.cat([few, many[:1]]).sum()


def test_equal_forms_select_unequal_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    check(of_equal_forms, [(torch.rand(n, generator=generator),) for n in (17, 14, 19)])


class Narrow(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x[: int(n)].exp() + 1


class Topk(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.topk(x, int(n) + 1, dim=1)
        return values * 2, places


class Made(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = int(n.max())
        return torch.arange(k) + 1, torch.zeros([k, x.size(1)]) + x.sum(0)


class Parts(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k = int(n)
        return x[:, k : k + 1].exp(), x[k:] * 2, x.new_full([k + 1], 2.0).tanh()


class OfASelection(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = x[x > 0]
        return chosen.view(-1, 1) * 2, chosen[: int(n)].exp()


@pytest.mark.parametrize("module", [Narrow(), Topk(), Made(), Parts(), OfASelection()])
def test_numbers_that_are_read(module: torch.nn.Module) -> None:
    samples = [(SAMPLE, torch.tensor(n)) for n in (2, 1, 0, 3)]
    if isinstance(module, OfASelection):
        samples += every(torch.tensor(1))
    check(module, samples, how=script)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * int(n)


class Along(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.softmax(dim=int(n))


@pytest.mark.parametrize("module", [Scaled(), Along()])
def test_a_number_that_is_no_size_stays_outside(module: torch.nn.Module) -> None:
    """It may be negative, or decide about the program."""
    seen = view(script(module, (SAMPLE, torch.tensor(1))))
    [read] = [i for i, n in enumerate(seen.nodes) if "aten::Int" in n.name]
    assert seen.excluded[read].code is Code.DATA_DEPENDENT


def test_a_negative_number_is_declined() -> None:
    samples = [(SAMPLE, torch.tensor(n)) for n in (2, 1, -1, 2)]
    engine = check(Narrow(), samples, how=script, declines=1)
    assert engine.stats()["guard_shape"] == 1


def test_sizes_that_have_to_agree() -> None:
    """A selection of as many elements as another input has; one element would be broadcast, and is declined."""
    w = torch.randn(6)
    some = torch.tensor([1.0, -1, 2, 3, 4, 5, 6])
    one = torch.tensor([-1.0, -1, -2, 3, -4, -5, -6])
    check(lambda x, w: x[x > 0] + w, [(some, w), (some[1:], w[1:]), (one, w)], declines=1)


def test_a_model_is_one_engine_by_optimize() -> None:
    model = Plain(selections.of_a_mask).eval()
    config = Config(optimization_pipeline="disc", cache=False, time_budget=5)
    optimized = blade.optimize(model, SAMPLE, config)
    assert [c.backend for c in blade.report(optimized).clusters] == ["disc"]
    for (x,) in every():
        torch.testing.assert_close(optimized(x), model(x), equal_nan=True)
    [stats] = blade.stats(optimized).values()
    assert stats == {"calls": 6, "engine_runs": 6, "fallbacks": 0}
    saved = io.BytesIO()
    torch.jit.save(optimized, saved)
    saved.seek(0)
    loaded = torch.jit.load(saved)
    torch.testing.assert_close(loaded(SAMPLE), model(SAMPLE))
    assert [s["fallbacks"] for s in blade.stats(loaded).values()] == [0]


def of_boxes(x: torch.Tensor, features: torch.Tensor) -> Any:
    """The head of a detector: scores, boxes that do not overlap, and what the features have there."""
    keep = x[:, 0] > 0
    boxes, scores = x[keep].abs().cumsum(1), x[keep][:, 0].sigmoid()
    kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
    boxes = boxes[kept]
    regions = torch.cat([boxes.new_zeros(boxes.shape[0], 1), boxes], 1)
    pooled = torch.ops.torchvision.roi_align(features, regions, 1.0, 2, 2, 2, False)
    return scores[kept] * 2, pooled.flatten(1).tanh() + 1


@pytest.mark.needs("torchvision")
def test_boxes_and_regions_of_torchvision() -> None:
    importlib.import_module("torchvision")  # which defines the ops
    check(of_boxes, every(torch.randn(1, 2, 6, 6)))

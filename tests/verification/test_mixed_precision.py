# SPDX-License-Identifier: Apache-2.0
"""Clusters whose results are float32 and that compute in 16 bits on the way, as autocast's gradients are."""

from collections.abc import Callable
from typing import Any

import torch
from fake_backends import PythonEngine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.core.cluster import Cluster, ValueInfo
from blade.core.reason import Code, Reason
from blade.report import Verdict
from blade.verification.tolerance import narrowest
from blade.verification.verify import verify

Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
SAMPLE = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def traced(function: Function) -> torch.fx.GraphModule:
    with FakeTensorMode():
        gm: torch.fx.GraphModule = make_fx(function)(torch.empty(64, 64))
    return gm


def verdict(original: Function, engine: Function, saved: tuple[int, ...] = ()) -> Any:
    """Of the one sample alone, as in training."""
    gm = traced(original)
    info = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    cluster = Cluster("cluster_0", gm, ShapeEnv(), (info,), (), [(SAMPLE,)], [])
    fake = PythonEngine(traced(engine))
    return verify(cluster, fake, gm, "fake", derived=False, seconds=1.0, saved=saved)  # type: ignore[arg-type]


def coarse(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Off by a tenth of its magnitude: more than float32 ever is."""
    return ((x.bfloat16() + 64).float() - 64,)


def test_a_coarse_original_does_not_make_an_exact_engine_wrong() -> None:
    assert narrowest(traced(coarse).graph) == torch.bfloat16
    found = verdict(coarse, lambda x: (x + 64 - 64,))
    assert isinstance(found, Verdict)
    assert found.original_error_fp64 is not None and found.original_error_fp64 > 0.05


def test_what_is_further_off_is_wrong() -> None:
    found = verdict(coarse, lambda x: (x * 0.4,))
    assert isinstance(found, Reason) and found.code is Code.WRONG_VALUES


def test_the_gradient_that_cancels_out_is_rounding_alone() -> None:
    """Small beside the other outputs, and as far from the truth as it is large."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x.bfloat16()
        return (x * 100).bfloat16().float(), (half.float() - x).sum(0)

    def otherwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 100).bfloat16().float(), (x - x).sum(0)

    assert isinstance(verdict(function, otherwise), Verdict)


def test_a_number_that_is_exact_by_luck_is_held_to_what_the_others_are() -> None:
    """A loss: one element, whose error says nothing of how exactly it was computed."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.bfloat16().float()
        return y, y * 2, x.square().sum()

    def otherwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.bfloat16().float()
        return y, y * 2, y.square().sum()

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.bfloat16().float()
        return y, y * 2, y.square().sum() * 1.1

    assert isinstance(verdict(function, otherwise), Verdict)
    found = verdict(function, wrong)
    assert isinstance(found, Reason) and found.code is Code.WRONG_VALUES


def signs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The mask that forward saves for the gradient of relu, behind a product that is rounded to 16 bits."""
    y = x.bfloat16()
    return (y @ y @ y <= 0,)


def unrounded_signs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.bfloat16().float()
    return (y @ y @ y <= 0,)


def test_a_saved_mask_may_flip_where_rounding_flips_it() -> None:
    share = (signs(SAMPLE)[0] != unrounded_signs(SAMPLE)[0]).float().mean()
    assert 0 < share < 0.01
    assert isinstance(verdict(signs, unrounded_signs, saved=(0,)), Verdict)
    inverted = verdict(signs, lambda x: (~signs(x)[0],), saved=(0,))
    assert isinstance(inverted, Reason) and inverted.code is Code.WRONG_VALUES
    returned = verdict(signs, unrounded_signs)  # what a model returns is the user's
    assert isinstance(returned, Reason) and returned.code is Code.WRONG_VALUES


def narrow_signs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in float32: what cancels out leaves little more than rounding."""
    halves = x[:, :32] @ x[:32] + x[:, 32:] @ x[32:]
    return (x @ x - halves + 1e-5 * x <= 0,)


def test_a_saved_mask_of_float32_may_flip_too() -> None:
    share = (narrow_signs(SAMPLE)[0] != (SAMPLE <= 0)).float().mean()
    assert 0 < share < 0.3
    assert isinstance(verdict(narrow_signs, lambda x: (x <= 0,), saved=(0,)), Verdict)
    inverted = verdict(narrow_signs, lambda x: (x > 0,), saved=(0,))
    assert isinstance(inverted, Reason) and inverted.code is Code.WRONG_VALUES
    steady = verdict(lambda x: (x <= 0,), lambda x: (x <= 1e-3,), saved=(0,))
    assert isinstance(steady, Reason) and steady.code is Code.WRONG_VALUES


def pooled_places(product: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = torch.ops.aten.max_pool2d_with_indices(product[None, None].float(), [2, 2])
    return (found[1],)


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where the maxima of a product that is rounded to 16 bits lie, as forward saves it for the gradient."""
    y = x.bfloat16()
    return pooled_places(y @ y @ y)


def unrounded_pooled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.bfloat16().float()
    return pooled_places((y @ y @ y).bfloat16())


def test_saved_indices_of_pooling_may_differ_where_rounding_decides() -> None:
    share = (pooled(SAMPLE)[0] != unrounded_pooled(SAMPLE)[0]).float().mean()
    assert 0 < share < 0.02
    assert isinstance(verdict(pooled, unrounded_pooled, saved=(0,)), Verdict)
    next_ones = verdict(pooled, lambda x: (pooled(x)[0] + 1,), saved=(0,))
    assert isinstance(next_ones, Reason) and next_ones.code is Code.WRONG_VALUES
    returned = verdict(pooled, unrounded_pooled)
    assert isinstance(returned, Reason) and returned.code is Code.WRONG_VALUES


def test_other_saved_integers_are_exact() -> None:
    saved = verdict(lambda x: (x.long(),), lambda x: ((x + 1e-3).long(),), saved=(0,))
    assert isinstance(saved, Reason) and saved.code is Code.WRONG_VALUES

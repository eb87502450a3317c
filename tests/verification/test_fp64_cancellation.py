# SPDX-License-Identifier: Apache-2.0
"""In fp64 no run is more exact than the original: what one rounding of it moves is no fault of an engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from verified import cluster, run

from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason
from blade.report import Verdict
from blade.verification.rounding_noise import RoundingNoise

aten = torch.ops.aten
X = torch.rand(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5


class Cancels(nn.Module):
    """``(x + 1e4)^3 - x^3 - ...``: 12 digits of the terms are gone in the result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        far = aten.add.Tensor(x, 1e4)
        cube = aten.mul.Tensor(aten.mul.Tensor(far, far), far)
        whole = aten.sub.Tensor(cube, 1e12)
        rest = aten.add.Tensor(aten.mul.Tensor(x, 3e8), 0.0)
        return (aten.sub.Tensor(whole, rest),)


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.mul.Tensor(aten.add.Tensor(x, 1.0), x),)


def in_another_order(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    x = inputs[0]
    far = x + 1e4
    return [(far * (far * far) - x * 3e8) - 1e12]


class Divides(nn.Module):
    """Divides by ``(x + 1) - 1``, which is 0 at small contents unless the sum is rounded up."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.div.Tensor(x, aten.sub.Tensor(aten.add.Tensor(x, 1.0), 1.0)),)


class Narrows(Divides):
    """Its result is float32, what it computes in is not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        [wide] = super().forward(x)
        return (aten._to_copy.default(wide, dtype=torch.float32),)


def by_itself(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    return [(inputs[0] / inputs[0]).to(outputs[0].dtype)]


def infinite_elsewhere(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    """At contents other than the sample's, where the original is finite and far from any limit."""
    [x], [out] = inputs, outputs
    if call == 0 or not bool(x.isfinite().all()):
        return outputs
    return [torch.where((x > 0.9) & out.isfinite(), float("inf"), out)]


class DividesByAFew(nn.Module):
    """Half of it divides by ``(x + 1e-4) - 1e-4``: at small contents 0 or a rounding or two."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        some, rest = aten.slice.Tensor(x, 0, 0, 32), aten.slice.Tensor(x, 0, 32, 64)
        few = aten.sub.Tensor(aten.add.Tensor(some, 1e-4), 1e-4)
        return (aten.cat.default([aten.div.Tensor(some, few), aten.mul.Tensor(rest, 2.0)]),)


def large_in(count: int) -> Callable[..., list[torch.Tensor]]:
    """The first ``count`` values are 100 at small contents, as if the rounding were a hundredth."""

    def wrong(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        [x], [out] = inputs, outputs
        is_small = 0 < float(x.abs().max()) < 1e-10
        return [torch.where((torch.arange(64) < count) & is_small, 100.0, out)]

    return wrong


class Compares(nn.Module):
    """A mask of what is 0 or a rounding at small contents."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.gt.Scalar(aten.sub.Tensor(aten.add.Tensor(x, 1e-4), 1e-4), 0.0),)


def other_masks(count: int) -> Callable[..., list[torch.Tensor]]:
    def wrong(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        is_small = 0 < float(inputs[0].abs().max()) < 1e-10
        return [outputs[0] ^ ((torch.arange(64) < count) & is_small)]

    return wrong


def off_by(relative: float) -> Callable[..., list[torch.Tensor]]:
    def wrong(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        return [out * (1 + relative) for out in outputs]

    return wrong


def of(module: nn.Module) -> Cluster:
    return cluster(module, [X])


def test_what_cancels_out_may_be_rounded_in_another_order() -> None:
    [want] = Cancels()(X)
    [got] = in_another_order([], [X], 0)
    assert float((got - want).abs().max() / want.abs().max()) > 1e-12  # what rounding is allowed
    assert isinstance(run(of(Cancels()), run=in_another_order), Verdict)


@pytest.mark.parametrize(("module", "relative"), [(Plain(), 1e-11), (Cancels(), 1e-3)])
def test_more_than_a_rounding_moves_is_wrong(module: nn.Module, relative: float) -> None:
    wrong = run(of(module), run=off_by(relative))
    assert isinstance(wrong, Reason) and wrong.code is Code.WRONG_VALUES


def test_pointwise_ops_round_in_fp64_and_exact_ones_do_not() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return aten.mul.Tensor(x, x), aten.neg.default(x), aten.exp.default(x.float())

    gm = torch.fx.symbolic_trace(Both())
    (moved, exact, single), want = RoundingNoise(gm, 0)(X), gm(X)
    assert 0 < float(((moved - want[0]) / want[0]).abs().max()) < 1e-15
    assert torch.equal(exact, want[1]) and torch.equal(single, want[2])


@pytest.mark.parametrize("module", [Divides(), Narrows()])
def test_places_of_infinity_that_a_rounding_moves_are_no_fault(module: nn.Module) -> None:
    small = X * 1e-20
    assert bool(torch.isinf(Divides()(small)[0]).all()) and bool(
        (by_itself([small], [small], 1)[0] == 1).all()
    )
    verdict = run(of(module), run=by_itself)
    assert isinstance(verdict, Verdict), verdict


def test_products_below_the_normal_numbers_are_off_by_the_least_one() -> None:
    class Products(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return aten.mul.Tensor(x, y), aten.sub.Tensor(x, x), aten.mul.Tensor(x, 0.0)

    gm = torch.fx.symbolic_trace(Products())
    x, y = X * 1e-160, X * 2e-164
    (moved, difference, zero), (want, *_) = RoundingNoise(gm, 0)(x, y), gm(x, y)
    assert bool((want < torch.finfo(torch.float64).tiny).all()) and bool((want == 0).any())
    assert torch.equal((moved - want).abs(), torch.full_like(want, 5e-324))
    assert not difference.any() and not zero.any()


@pytest.mark.parametrize("module", [Plain(), Divides()])
def test_infinities_elsewhere_are_wrong(module: nn.Module) -> None:
    wrong = run(of(module), run=infinite_elsewhere)
    assert isinstance(wrong, Reason) and "places of infinity" in wrong.detail


def test_values_beside_infinities_are_as_large_as_roundings_are_small() -> None:
    small = X * 1e-20
    [want] = DividesByAFew()(small)
    assert 0 < int(want.isinf().sum()) < 32 and float(want[want.isfinite()].abs().max()) < 2
    assert isinstance(run(of(DividesByAFew()), run=large_in(4)), Verdict)
    wrong = run(of(DividesByAFew()), run=large_in(40))  # more than a rounding moves
    assert isinstance(wrong, Reason) and wrong.code is Code.WRONG_VALUES
    wrong = run(of(Plain()), run=large_in(4))
    assert isinstance(wrong, Reason) and wrong.code is Code.WRONG_VALUES


def test_a_mask_may_be_of_another_rounding() -> None:
    assert isinstance(run(of(Compares()), run=other_masks(2)), Verdict)
    wrong = run(of(Compares()), run=lambda outputs, inputs, call: [~outputs[0]])
    assert isinstance(wrong, Reason) and wrong.code is Code.WRONG_VALUES

# SPDX-License-Identifier: Apache-2.0
"""A cluster that draws random numbers: all who compute it draw the same, and the user's generator is left alone."""

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
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.rng_replay import RngReplay
from blade.verification.verify import verify

aten = torch.ops.aten


def dropout(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, mask = aten.native_dropout(aten.sin(x), 0.5, True)
    return aten.exp(y), mask


def drawing(function: Callable[..., Any] = dropout) -> Cluster:
    with FakeTensorMode():
        gm = make_fx(function)(torch.empty(6, 8))
    sample = (torch.randn(6, 8, generator=torch.Generator().manual_seed(2)),)
    info = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    return Cluster("cluster_0", gm, ShapeEnv(), (info,), (), [sample], [])


def test_an_engine_that_draws_the_same_passes_and_moves_no_generator() -> None:
    cluster = drawing()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    verdict = verify(cluster, PythonEngine(cluster.gm), cluster.gm, "fake")  # type: ignore[arg-type]
    assert isinstance(verdict, Verdict) and verdict.error == 0 and verdict.checked > 1
    assert (
        verdict.error_fp64 is not None and verdict.error_fp64 < 1e-6
    )  # the same elements are left
    assert torch.equal(torch.get_rng_state(), before)


def test_an_engine_that_draws_in_another_order_does_not_pass() -> None:
    def once_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        aten.native_dropout(x, 0.5, True)
        return dropout(x)

    cluster, other = drawing(), drawing(once_more)
    verdict = verify(cluster, PythonEngine(other.gm), cluster.gm, "fake")  # type: ignore[arg-type]
    assert isinstance(verdict, Reason) and verdict.code is Code.WRONG_VALUES


def test_the_truth_is_drawn_in_the_dtype_of_the_original() -> None:
    cluster = drawing()
    with RngReplay(cluster.gm) as generators:
        want = generators.before(cluster.gm)(*cluster.samples[0])
        truth = Fp64Reference(cluster.gm, generators.reset)(cluster.samples[0])
    assert truth[0].dtype == torch.float64
    assert torch.equal(truth[1], want[1])
    torch.testing.assert_close(truth[0].float(), want[0])


def test_what_draws_nothing_touches_no_generator() -> None:
    gm = drawing(lambda x: (aten.sin(x),)).gm
    with RngReplay(gm) as generators:
        drawn = torch.rand(3)
        assert generators.before(torch.sin) is torch.sin
    torch.set_rng_state(torch.get_rng_state())
    assert not torch.equal(torch.rand(3), drawn)

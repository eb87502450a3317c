# SPDX-License-Identifier: Apache-2.0
"""Lossy engines: their form is judged like any other's, their values by the budget, nearer at the samples."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_backends import (
    Fault,
    PythonEngine,
    puts_nan,
    too_many,
    writes_its_input,
    wrong_dtype,
    wrong_shape,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends import registry
from blade.config import Config
from blade.config.accuracy import ELSEWHERE, parse
from blade.core.cluster import Cluster, ValueInfo
from blade.core.reason import Code, Reason
from blade.report import Verdict
from blade.verification.reduced_precision import budget_of, has_reduced_precision
from blade.verification.verify import verify

Tensors = Sequence[torch.Tensor]
RNG = torch.Generator().manual_seed(0)
SAMPLE, PROBE = torch.randn(8, 16, generator=RNG), torch.randn(5, 16, generator=RNG)


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.aten.linear.default(x, self.const_0),)


def verdict_on(fault: Fault, budget: object) -> Verdict | Reason:
    gm = torch.fx.symbolic_trace(Product())
    info = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    cluster = Cluster("cluster_0", gm, ShapeEnv(), (info,), (), [(SAMPLE,)], [(PROBE,)])
    engine: Any = PythonEngine(gm, run=fault)
    return verify(cluster, engine, gm, "fake", budget=parse(budget))


def off_by(relative: float, at_sample: float | None = None) -> Fault:
    """Outputs with that relative error; another one where the input is the sample."""

    def fault(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
        own = at_sample is not None and inputs[0].shape == SAMPLE.shape
        error = at_sample if own and torch.equal(inputs[0], SAMPLE) else relative
        return [o * (1 + (error or 0.0)) for o in outputs]

    return fault


def test_what_is_within_the_budget_passes_and_its_error_is_told() -> None:
    verdict = verdict_on(off_by(0.02), 0.05)
    assert isinstance(verdict, Verdict)
    assert verdict.error == pytest.approx(0.02, rel=0.01)
    assert verdict.refused == 0


@pytest.mark.parametrize("budget", [0.05, {"snr_db": 26}])
def test_what_is_beyond_is_refused_with_the_numbers(budget: object) -> None:
    reason = verdict_on(off_by(0.06), budget)
    assert isinstance(reason, Reason)
    assert reason.code is Code.ACCURACY
    assert "at sample 0 (8x16) output 0 has a relative error of 0.06" in reason.detail
    assert "24.4 dB); allowed is a" in reason.detail


def test_elsewhere_more_is_allowed_but_not_anything() -> None:
    near, far = 0.9 * ELSEWHERE * 0.05, 1.1 * ELSEWHERE * 0.05
    assert isinstance(verdict_on(off_by(near, at_sample=0.01), 0.05), Verdict)
    reason = verdict_on(off_by(far, at_sample=0.01), 0.05)
    assert isinstance(reason, Reason)
    assert reason.code is Code.ACCURACY
    assert "at probe 0 (5x16)" in reason.detail


@pytest.mark.parametrize("fault", [puts_nan, wrong_shape, wrong_dtype, too_many, writes_its_input])
def test_a_wrong_form_is_as_wrong_as_ever(fault: Fault) -> None:
    reason = verdict_on(fault, 0.9)
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES


def test_what_int8_makes_of_an_infinity_is_no_defect() -> None:
    def saturates(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
        return [torch.nan_to_num(o, 0.0, 1.0, -1.0) for o in outputs]

    assert isinstance(verdict_on(saturates, 0.05), Verdict)


def test_what_is_out_of_all_ranges_may_saturate() -> None:
    def clips(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
        return [o.clamp(-30, 30) for o in outputs]

    assert isinstance(verdict_on(clips, 0.05), Verdict)


def test_floats_drawn_anew_may_leave_every_range_but_not_the_same_ones_shuffled() -> None:
    def wrong_beyond(limit: float) -> Fault:
        def fault(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
            known = torch.equal(inputs[0], SAMPLE) or inputs[0].shape != SAMPLE.shape
            far = float(inputs[0].std()) > limit
            return outputs if known or not far else [-o for o in outputs]

        return fault

    spread = float(SAMPLE.std())
    assert isinstance(verdict_on(wrong_beyond(1.1 * spread), 0.05), Verdict)
    reason = verdict_on(wrong_beyond(0.9 * spread), 0.05)
    assert isinstance(reason, Reason)
    assert "at shuffled contents" in reason.detail


def test_without_a_budget_the_same_engine_is_wrong() -> None:
    gm = torch.fx.symbolic_trace(Product())
    info = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    cluster = Cluster("cluster_0", gm, ShapeEnv(), (info,), (), [(SAMPLE,)], [(PROBE,)])
    engine: Any = PythonEngine(gm, run=off_by(0.001))
    reason = verify(cluster, engine, gm, "fake")
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES


def test_a_permission_makes_an_exact_backend_lossy() -> None:
    """TensorRT computes products in 16 bits where it is allowed to, and exactly elsewhere."""
    allowed = Config(enable_fp16=True, accuracy_budget=0.03)
    for name, lossy in (("tensorrt", True), ("disc", False), ("disc+tensorrt", True)):
        assert has_reduced_precision(name, allowed) is lossy
        assert not has_reduced_precision(name, Config(enable_int8=True))
    backend = registry.load("tensorrt")
    assert budget_of(backend, allowed) == parse(0.03)
    assert budget_of(backend, Config()) is None

# SPDX-License-Identifier: Apache-2.0
"""The table of op samples through the backends that hand ONNX to a library: every fourth sample each.

Of each sample, what the support table refuses has a Reason, and the rest converts and passes verification, but
for what only shows in a whole cluster, which then is refused, with a Reason: how results lie in memory, and
what becomes of NaN. All samples would take each of them some minutes: BLADE_OP_SAMPLES=all pytest ...
"""

import os
from collections.abc import Sequence

import pytest
from op_samples import Sample
from op_table import SAMPLES
from op_units import Found, judged
from tiers import FAMILIES

import blade
from blade.backends import registry
from blade.core.reason import Code, Reason, Stage

pytestmark = pytest.mark.needs("runtime")
CONFIG = blade.Config(cache=False)
LEAST = {"onnxruntime": 40, "openvino": 30}  # overloads in engines that passed
BACKENDS = [pytest.param(name, marks=pytest.mark.needs(name)) for name in LEAST]
# The tracer fails on these (``test_op_models`` says so); nothing is asked of a backend.
NOT_TRACED = {"Scalar overloads of bits", "bit operators", "full"}
# Samples whose NaN or infinities are others in the library: found, and refused, when a cluster is verified.
# OpenVINO's exp, softmax, ReLU, comparisons ... lose them.
NOT_FINITE = {
    "onnxruntime": {"group_norm", "attention", "attention causal", "attention gqa"},
    "openvino": {sample.name for sample in SAMPLES},
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sample_of_each_family_is_refused_or_right(name: str) -> None:
    samples = [s for s in SAMPLES if s.name in FAMILIES - NOT_TRACED]
    assert len(all_refused_or_right(name, samples)) > 12


@pytest.mark.parametrize("name", BACKENDS)
def test_every_op_sample_is_refused_or_right(name: str) -> None:
    samples = [s for s in SAMPLES if s.name not in NOT_TRACED]
    if os.environ.get("BLADE_OP_SAMPLES") != "all":
        samples = samples[list(LEAST).index(name) :: 4]
    assert len(all_refused_or_right(name, samples)) > LEAST[name]


def all_refused_or_right(name: str, samples: Sequence[Sample]) -> set[str]:
    """The overloads in engines that passed."""
    found = {one.sample: one for one in judged(registry.load(name), samples, CONFIG)}
    assert len(found) > 0.95 * len(samples)  # a few are constants as a whole
    assert all(one.refused or one.verdicts for one in found.values())
    assert all(r.detail.endswith(".") for one in found.values() for r in one.refused)
    failed = {n: why for n, one in found.items() if (why := unexpected(name, one))}
    assert failed == {}
    return set().union(*(one.ops for one in found.values()))


def unexpected(backend: str, one: Found) -> list[Reason]:
    """The failures of a sample that are not among the exceptions."""

    def is_known(reason: Reason) -> bool:
        if reason.stage is Stage.CONVERT:  # how the results of a cluster lie, its nodes do not tell
            return "only results whose elements are laid out densely" in reason.detail
        if one.sample == "losses" and "the original's own error being unknown" in reason.detail:
            return True  # large numbers, of whose difference nothing is left in fp32 or fp64
        wrong = reason.code is Code.WRONG_VALUES
        not_finite = one.sample in NOT_FINITE[backend] and "non-finite" in reason.detail
        return wrong and not_finite

    return [reason for reason in one.failures if not is_known(reason)]

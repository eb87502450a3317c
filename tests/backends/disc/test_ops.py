# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table, compiled once and run at many shapes, against eager torch.

Where eager raises, the engine gives no answer.
"""

from typing import Any

import pytest
import torch
from op_compare import sizes_of
from op_engine import check
from op_per_rule import ONE_PER_RULE
from op_samples import Sample, inputs
from op_table import EVERY
from op_trace import ops_of

from blade.backends.disc.frontend.ops.table import TABLE
from blade.backends.disc.target.cpu import host

_OF_CUDA = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}
"""Ops without a kernel for CPUs; test_efficient_attention.py looks at what becomes of them."""

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]


@pytest.mark.parametrize("sample", EVERY, ids=lambda s: s.name)
def test_answers_are_eagers(sample: Sample) -> None:
    graph, wrong = check(sample, host())
    assert not wrong, "\n".join(wrong)
    calls = [v for v in graph.values if v.op == "call"]
    assert sample.called == bool(calls), "\n".join(map(str, calls)) or graph


def test_every_row_has_a_sample() -> None:
    seen: set[Any] = set()
    for sample in EVERY:
        seen |= ops_of(sample.function, inputs(sample, next(sizes_of(sample))))
    assert sorted(map(str, set(TABLE) - seen - _OF_CUDA)) == []


def test_make_test_reaches_every_rule() -> None:
    """By the samples of ``ONE_PER_RULE``. Rules that one function of Python makes count as one."""
    chosen = [sample for sample in EVERY if sample.name in ONE_PER_RULE]
    assert {sample.name for sample in chosen} == ONE_PER_RULE
    seen: set[Any] = set()
    for sample in chosen:
        seen |= ops_of(sample.function, inputs(sample, next(sizes_of(sample))))
    reached = {TABLE[op].__code__ for op in seen | _OF_CUDA if op in TABLE}
    assert [str(op) for op, rule in TABLE.items() if rule.__code__ not in reached] == []

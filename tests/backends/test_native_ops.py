# SPDX-License-Identifier: Apache-2.0
"""Samples of the op table, many in one model, through AOTInductor and TVM."""

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch
from op_compare import different, eager, exact, sizes_of
from op_samples import Sample, inputs
from op_table import SAMPLES
from op_units import judged
from torch import nn
from torch.utils._pytree import tree_leaves

import blade
from blade.backends import registry

pytestmark = pytest.mark.needs("runtime", "g++")
BY_NAME = {sample.name: sample for sample in SAMPLES}
# One model each. Not here: gather and embedding, whose code in AOTInductor ends the
# process at an index out of range.
GROUPS = [
    pytest.param("inductor", "layer_norm dynamic|cumsum|cat|argmax|matmul", id="inductor"),
    pytest.param(
        "tvm",
        "linear vector|matmul|matmul broadcast|permute",
        id="tvm",
        marks=pytest.mark.needs("tvm"),
    ),
]


class Several(nn.Module):
    """The samples of copies of their inputs, one after the other."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        results: list[torch.Tensor] = []
        for sample in self.samples:
            made = sample.function(*[next(given).clone() for _ in sample.specs])
            results += [t for t in tree_leaves(made) if t is not None]
        return tuple(results)


def calls(samples: Sequence[Sample]) -> Iterator[list[list[torch.Tensor]]]:
    """Per call the tensors of every sample: at their usual sizes, at odd ones, and all of size 1."""
    for sizes in zip(*(list(sizes_of(s))[:3] for s in samples), strict=True):
        yield [inputs(sample, size) for sample, size in zip(samples, sizes, strict=True)]


@pytest.mark.parametrize(("backend", "names"), GROUPS)
def test_ops(backend: str, names: str) -> None:
    samples = [BY_NAME[name] for name in names.split("|")]
    usual, *others = calls(samples)
    config = blade.Config(
        optimization_pipeline=backend, timing=False, min_cluster_size=1, cache=False, strict=True
    )
    optimized = blade.optimize(Several(samples).eval(), tuple(chain(*usual)), config)
    report = blade.report(optimized)
    assert not [r for r in report.all_reasons() if r.backend == backend], str(report)
    for tensors in (usual, *others):
        with torch.no_grad():
            got = iter(tree_leaves(optimized(*chain(*tensors))))
        for sample, own in zip(samples, tensors, strict=True):
            want = eager(sample, own)
            assert want is not None, sample.name
            mine = [next(got) for _ in want]
            assert not (how := different(mine, want, exact(sample, own))), f"{sample.name}: {how}"
    served = blade.stats(optimized).values()
    assert served
    assert all(counted["engine_runs"] > 1 for counted in served)


# One engine each, every sample of it verified by itself. What their tables refuse of these has a Reason.
MANY = [
    pytest.param(
        "tvm",
        "neg|abs|exp|tanh|erf|sigmoid|sqrt|rsqrt|add|sub|mul|div|eq scalar|ne scalar|masked_fill|relu|silu|gelu|"
        "gelu tanh|softmax|softmax axes|layer_norm|layer_norm axes|layer_norm dynamic|view|reshape|unsqueeze|"
        "transpose|permute|copies|mean dims|sum dims|mean|sum|linear|linear vector|linear dynamic|mm|bmm|matmul|"
        "matmul vectors|matmul broadcast|geglu|rotary|attention by hand|rms_norm by hand",
        id="tvm",
        marks=pytest.mark.needs("tvm"),
    ),
]


# TVM's ReLU loses NaN, which is found when a cluster is verified.
NOT_FINITE = {"tvm": {"relu", "mm"}}


@pytest.mark.parametrize(("backend", "names"), MANY)
def test_every_sample_is_refused_or_right(backend: str, names: str) -> None:
    samples = [BY_NAME[name] for name in names.split("|")]
    config = blade.Config(cache=False)
    found = list(judged(registry.load(backend), samples, config, count=len(samples)))
    assert [one.sample for one in found] == [s.name for s in samples]
    failed = {(one.sample, reason.detail) for one in found for reason in one.failures}
    lost = NOT_FINITE[backend]
    assert {(n, why) for n, why in failed if n not in lost or "non-finite" not in why} == set()
    assert all(one.ops or one.refused for one in found)

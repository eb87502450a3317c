# SPDX-License-Identifier: Apache-2.0
"""onnx's own tests of nodes, through the importer: ``make test`` runs one per op, ``make test-all`` all of them."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.needs("runtime", "onnx", "onnxruntime")

FAILING = {
    "test_attention_4d_causal_fp16",  # sums of float16 in another order
    "test_attention_4d_causal_fp16_expanded",
    "test_dft_inverse",  # expects a rounding error of numpy where the exact answer is 0
    "test_dft_inverse_opset19",
    "test_scan_sum",  # Scan of opset 8
}


@cache
def _bench() -> Any:
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[3] / "benchmarks" / "bench_onnx_nodes.py"
    spec = importlib.util.spec_from_file_location("bench_onnx_nodes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _tests() -> tuple[Any, ...]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return tuple(sorted(found, key=lambda one: str(one.name)))


def _first_of_each_op() -> Iterator[Any]:
    seen = set()
    for test in _tests():
        ops = {node.op_type for node in test.model.graph.node}
        if not ops <= seen and test.name not in FAILING and len(test.model.graph.node) < 4:
            seen |= ops
            yield test


def _wrong(tests: Any) -> dict[str, str]:
    outcomes = {test.name: _bench().run(test) for test in tests}
    assert sum(outcome == "passed" for outcome, _ in outcomes.values()) > len(outcomes) * 0.8
    return {name: detail for name, (outcome, detail) in outcomes.items() if outcome == "failed"}


def test_one_node_test_of_each_op() -> None:
    tests = list(_first_of_each_op())
    assert len(tests) > 150
    assert _wrong(tests) == {}


def test_all_node_tests() -> None:
    assert set(_wrong(_tests())) <= FAILING
    assert torch.is_grad_enabled()

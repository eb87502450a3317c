# SPDX-License-Identifier: Apache-2.0
"""Programs without instructions: what an engine of a library takes, and what it has to give back."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cutting import cut, trace

from blade.backends.shared.output_buffers import OutputBuffers
from blade.core.cluster import Cluster
from blade.graph.fx.exported_program import to_exported
from blade.program.guard_program import guard_program, with_ranges
from blade.runtime.engine import make_engine, register_runner

pytestmark = pytest.mark.needs("runtime")
_numbers = itertools.count()


def cluster_of(function: Any, *samples: Sequence[torch.Tensor]) -> Cluster:
    [extracted] = cut(trace(function, *map(tuple, samples)))
    return extracted.cluster


def engine_of(cluster: Cluster, program: str) -> Any:
    """Answers with the cluster's own graph."""
    name = f"graph_{next(_numbers)}"
    register_runner(name, lambda *_: lambda inputs: list(cluster.gm(*inputs)))
    return make_engine("cluster_0", name, program, b"")


def reshaped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.reshape(x.shape[0], -1, 2) * 2 + y).relu()


def reshaped_inputs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, columns), torch.randn(rows, columns // 2, 2)


def test_what_the_shapes_rely_on_is_guarded() -> None:
    cluster = cluster_of(reshaped, reshaped_inputs(3, 8), reshaped_inputs(5, 12))
    engine = engine_of(cluster, guard_program(cluster))
    for rows, columns in ((3, 8), (7, 2), (1, 4)):
        inputs = reshaped_inputs(rows, columns)
        [got] = engine.try_execute(list(inputs))
        torch.testing.assert_close(got, reshaped(*inputs))
    x, y = reshaped_inputs(3, 8)
    assert engine.try_execute([x, y[:, :2]]) is None
    assert engine.try_execute([x.double(), y]) is None
    assert engine.try_execute([x, y[0]]) is None
    stats = engine.stats()
    assert (stats["guard_shape"], stats["guard_dtype"], stats["guard_rank"]) == (1, 1, 1)


def test_empty_inputs_run_the_original_unless_asked_for() -> None:
    cluster = cluster_of(lambda x: (x * 2).relu() + 1, [torch.randn(3, 8)], [torch.randn(5, 6)])
    empty = [torch.randn(0, 8)]
    assert engine_of(cluster, guard_program(cluster)).try_execute(empty) is None
    [got] = engine_of(cluster, guard_program(cluster, least=0)).try_execute(empty)
    assert got.shape == (0, 8)


def test_ranges_are_guards_per_axis() -> None:
    cluster = cluster_of(reshaped, reshaped_inputs(3, 8), reshaped_inputs(5, 12))
    program = guard_program(cluster, {(0, 0): (2, 4)})
    assert with_ranges(program, {}) == program
    engine = engine_of(cluster, program)
    served = [rows for rows in range(7) if engine.try_execute(list(reshaped_inputs(rows, 4)))]
    assert served == [2, 3, 4]


def test_a_declared_size_is_guarded() -> None:
    """A symbol the ops forced to a number, and equal sizes."""

    def fixed(x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.ones(4, 3) + 1) * 2

    cluster = cluster_of(fixed, [torch.randn(3, 4)], [torch.randn(5, 4)])
    engine = engine_of(cluster, guard_program(cluster))
    assert engine.try_execute([torch.randn(2, 4)]) is not None
    assert engine.try_execute([torch.randn(2, 5)]) is None


def test_guards_an_exporter_adds_count() -> None:
    cluster = cluster_of(lambda x: torch.tanh(x) * 2 + 1, [torch.randn(3, 4)], [torch.randn(5, 6)])
    to_exported(cluster)
    [x] = [n for n in cluster.gm.graph.nodes if n.op == "placeholder"]
    assert x.meta["val"].shape[0] < 100  # asked by whoever traces the graph again
    assert x.meta["val"].shape[1] == 6  # and this fixes a size
    engine = engine_of(cluster, guard_program(cluster))
    assert engine.try_execute([torch.randn(99, 6)]) is not None
    assert engine.try_execute([torch.randn(100, 6)]) is None
    assert engine.try_execute([torch.randn(3, 4)]) is None


def test_results_have_the_sizes_of_the_program() -> None:
    def several(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return y.reshape(-1, 2) * 2, y.sum() + 1, y.permute(1, 0) > 0

    cluster = cluster_of(several, [torch.randn(4, 6)], [torch.randn(2, 8)])
    results = OutputBuffers(guard_program(cluster), [None, None, (1, 0)])
    x = torch.randn(6, 10)
    for _ in range(2):  # the second time from memory
        buffers, answers = results.allocate([x])
        want = several(x)
        assert [a.shape for a in answers] == [w.shape for w in want]
        assert [a.dtype for a in answers] == [w.dtype for w in want]
        assert [a.stride() for a in answers] == [w.stride() for w in want]
        assert all(b.is_contiguous() for b in buffers)

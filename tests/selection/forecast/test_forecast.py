# SPDX-License-Identifier: Apache-2.0
"""Which backends are worth trying: work, records of similar work, and what follows where a forecast was wrong."""

import json
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_backends import Fake, registered, wrong_values

import blade
from blade.backends import registry
from blade.clustering.problem import Group
from blade.config import Config
from blade.core.cluster import OpNode, ValueInfo
from blade.core.reason import Code
from blade.partition.support import Support
from blade.report import Timing, Verdict
from blade.selection.forecast import records
from blade.selection.forecast.forecast import why_unlikely
from blade.selection.forecast.records import SpeedRecord, compared, known_records
from blade.selection.forecast.work import BYTES, FLOPS, KINDS, Work, work_of
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import Decision

CPU = torch.device("cpu")
ATEN = torch.ops.aten


def value(*shape: int) -> ValueInfo:
    return ValueInfo("tensor", torch.float32, CPU, len(shape), shape)


def node(target: Any, args: tuple[Any, ...], *out: int, **kwargs: Any) -> OpNode:
    return OpNode("%y", target, args, kwargs, (value(*out),))


@pytest.mark.parametrize(
    ("one", "kind", "flops"),
    [
        (
            node(ATEN.linear.default, (value(8, 64), value(256, 64), None), 8, 256),
            "products",
            2 * 8 * 256 * 64,
        ),
        (
            node(ATEN.addmm.default, (value(256), value(8, 64), value(64, 256)), 8, 256),
            "products",
            2 * 8 * 256 * 64,
        ),
        (
            node(ATEN.matmul.default, (value(4, 8, 64), value(4, 64, 16)), 4, 8, 16),
            "products",
            2 * 4 * 8 * 16 * 64,
        ),
        (
            node(ATEN.conv2d.default, (value(1, 3, 9, 9), value(16, 3, 3, 3)), 1, 16, 7, 7),
            "convolutions",
            2 * 16 * 49 * 27,
        ),
        (
            node(
                ATEN.conv2d.default,
                (value(1, 16, 9, 9), value(16, 1, 3, 3)),
                1,
                16,
                7,
                7,
                groups=16,
            ),
            "grouped",
            2 * 16 * 49 * 9,
        ),
        (
            node(ATEN.conv_transpose2d.input, (value(1, 4, 5, 5), value(4, 8, 2, 2)), 1, 8, 10, 10),
            "convolutions",
            2 * 4 * 25 * 8 * 4,
        ),
        (
            node(
                ATEN.scaled_dot_product_attention.default,
                (value(1, 2, 8, 16), value(1, 2, 32, 16)),
                1,
                2,
                8,
                16,
            ),
            "attention",
            4 * 2 * 8 * 32 * 16,
        ),
        (node(ATEN.relu.default, (value(8, 64),), 8, 64), "others", 0),
    ],
)
def test_work_counts_operations_by_kind(one: OpNode, kind: str, flops: int) -> None:
    found = dict(zip(KINDS, work_of([one]).seconds, strict=True))
    written = 4 * prod(one.outputs[0].shape or ())
    assert found.pop(kind) == pytest.approx(flops / FLOPS + written / BYTES)
    assert set(found.values()) == {0.0}


def test_a_view_is_no_work() -> None:
    assert sum(work_of([node(ATEN.transpose.int, (value(8, 64), 0, 1), 64, 8)]).seconds) == 0


def products(seconds: float = 1e-3, ops: int = 10) -> Work:
    return Work((seconds, 0.0, 0.0, 0.0, 0.0, 0.0), ops)


PRODUCTS = products()


def record(ratio: float | None, backend: str = "rival", work: Work = PRODUCTS) -> SpeedRecord:
    return SpeedRecord(backend, "cpu", work.seconds, work.ops, ratio)


def test_a_backend_that_lost_at_all_similar_graphs_is_unlikely_to_win() -> None:
    why = why_unlikely("rival", products(), [], [record(1.2), record(1.5), record(None)])
    assert why is not None and "at 3 graphs" in why and "1.20x to 1.50x" in why
    assert "no engine that serves at 1 of them" in why and 'Config(search="all")' in why


@pytest.mark.parametrize(
    "shipped",
    [
        [record(1.2), record(0.9), record(1.5)],  # it won once
        [record(1.2), record(1.5)],  # too few
        [record(1.2, "other")] * 5,  # another backend
        [record(1.2, work=Work((0.0, 1e-3, 0.0, 0.0, 0.0, 0.0), 10))] * 5,  # convolutions
        [record(1.2, work=products(10.0, 2000))] * 5,  # far larger
    ],
)
def test_where_little_is_known_a_backend_may_win(shipped: list[SpeedRecord]) -> None:
    assert why_unlikely("rival", products(), [], shipped) is None


def test_records_of_this_machine_count_first() -> None:
    lost, won = [record(1.3)] * 3, [record(0.8)] * 3
    assert why_unlikely("rival", products(), won, lost) is None
    assert "on this machine" in str(why_unlikely("rival", products(), lost, won))
    assert "a machine like this" in str(why_unlikely("rival", products(), lost[:2], lost))


def test_the_records_that_come_with_blade_can_be_read() -> None:
    shipped = records._shipped()
    assert {"onnxruntime", "openvino"} <= {one.backend for one in shipped}
    assert all(len(one.work) == len(KINDS) and sum(one.work) > 0 and one.ops > 0 for one in shipped)


def timing(engine_ms: float, original_ms: float = 8.0, disturbed: int = 0) -> Timing:
    return Timing(
        ((8, 64),),
        original_ms,
        engine_ms,
        0.4 if disturbed else 0.01,
        rounds=5,
        disturbed=disturbed,
    )


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [
        ({"disc": timing(2.0), "ort": timing(3.0)}, {}, {"ort": 1.5}),
        # of a part DISC's share is not known: the speed-ups, 4x and 2x, are compared
        ({"disc": timing(2.0)}, {"ort": timing(2.0, 4.0)}, {"ort": 2.0}),
        # the largest group counts
        ({"disc": timing(2.0), "ort": timing(3.0)}, {"ort": timing(0.1, 4.0)}, {"ort": 1.5}),
        # what neighbours disturbed says nothing
        ({"disc": timing(2.0), "ort": timing(3.0, disturbed=5)}, {}, {}),
        ({"disc": timing(2.0, disturbed=5), "ort": timing(3.0)}, {}, {}),
        # without an engine of DISC's there is nothing to compare with
        ({"ort": timing(3.0)}, {}, {}),
    ],
)
def test_a_search_is_recorded(
    whole: dict[str, Timing], part: dict[str, Timing], expected: dict[str, float]
) -> None:
    nodes = [node(ATEN.relu.default, (value(8, 64),), 8, 64)] * 4
    label = frozenset({"disc", "ort"})
    builts, decisions = [], {}
    for members, times in (((0, 1, 2, 3), whole), ((0, 1), part)):
        name = f"cluster_{len(builts)}"
        tried = tuple(Candidate(b, None, None, Verdict(1, 0, 0.0), (t,)) for b, t in times.items())
        builts.append(ClusterCandidates(name, Group(members, label), None, (), (), ("disc", "ort")))
        decisions[name] = Decision(None, (), tried)
    view: Any = SimpleNamespace(nodes=nodes)
    plan = Support((label,) * 4, ())
    found = compared(view, plan, ["disc", "ort"], builts, decisions)
    assert {one.backend: one.ratio for one in found} == expected
    assert all((one.machine[:3], one.ops) == ("cpu", 4) for one in found)


# The whole path, with a rival of DISC's.


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch, cluster_cache: Any) -> Iterator[Fake]:
    """DISC and one other backend, of which nothing is known. Its engines are wrong: it loses whatever the load."""
    rival = Fake("rival", in_process=False, version="1", run=wrong_values)
    row = registry._BUILT_IN["disc"]
    monkeypatch.delenv("BLADE_BACKENDS", raising=False)
    monkeypatch.setattr(registry, "_BUILT_IN", {"disc": row})
    monkeypatch.setattr(records, "_shipped", lambda: ())
    with registered(rival):
        yield rival


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    return torch.nn.Sequential(*layers).eval()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def not_tried(module: Any) -> list[str]:
    reasons = blade.report(module).all_reasons()
    return [str(r.backend) for r in reasons if r.code is Code.NOT_TRIED and "predicted" in r.detail]


def tried(module: Any) -> set[str]:
    return {one.backend for c in blade.report(module).clusters for one in c.tried}


@pytest.mark.needs("torch_mlir", "runtime")
def test_what_lost_here_is_not_tried_again(rivals: Fake) -> None:
    machine = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    for width in (24, 28, 36):  # nothing is known before
        model = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, 8)
        )
        first = blade.optimize(model.eval(), X)
        assert "rival" in tried(first) and not_tried(first) == []
    learned, _ = known_records(Config(), machine)
    assert [(one.backend, one.ratio) for one in learned] == [("rival", None)] * 3
    found = blade.optimize(mlp(), X)
    assert not_tried(found) == ["rival"] and tried(found) == {"disc"}
    torch.testing.assert_close(found(X), mlp()(X))
    assert "rival" in tried(blade.optimize(mlp(), X, Config(search="all")))


@pytest.mark.needs("torch_mlir", "runtime")
def test_where_disc_does_not_serve_the_search_is_wider(
    rivals: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        records,
        "_shipped",
        lambda: tuple(
            SpeedRecord(
                "rival", f"cpu {torch.backends.cpu.get_cpu_capability()}", w.seconds, w.ops, 1.5
            )
            for w in [work_of(())] * 3
        ),
    )
    monkeypatch.setattr("blade.selection.forecast.forecast.NEAR", 1e9)
    assert not_tried(blade.optimize(mlp(), X)) == ["rival"]
    monkeypatch.setattr(registry.load("disc"), "convert", _fails)
    found = blade.optimize(
        torch.nn.Sequential(mlp(), torch.nn.Tanh()).eval(), X, Config(cache=False)
    )
    assert not_tried(found) == [] and "rival" in tried(found)
    assert (
        sum(r.backend == "rival" for r in blade.report(found).reasons if r.code is Code.NOT_TRIED)
        == 0
    )


def _fails(*_: Any) -> Any:
    raise RuntimeError("DISC is out of order")


PROGRAM = """
import sys, json, torch, blade
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).eval()
fast = blade.optimize(model, torch.randn(8, 64))
report = blade.report(fast)
left = sorted(str(r.backend) for r in report.all_reasons() if "predicted" in r.detail)
loaded = [n for n in ("onnxscript", "tvm", "torch._inductor.compile_fx") if n in sys.modules]
print(json.dumps([left, loaded, [c.backend for c in report.clusters]]))
"""


@pytest.mark.needs("torch_mlir", "runtime", "onnxruntime", "openvino")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="blade has records of AVX-512 alone"
)
def test_a_small_model_costs_no_search_among_libraries(cluster_cache: Any) -> None:
    """A fresh process, all backends installed."""
    import os

    env = {k: v for k, v in os.environ.items() if k != "BLADE_BACKENDS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    left, loaded, backends = json.loads(done.stdout.splitlines()[-1])
    assert {"onnxruntime", "openvino"} <= set(left) and loaded == [] and backends == ["disc"]

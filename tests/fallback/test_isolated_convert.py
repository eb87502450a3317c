# SPDX-License-Identifier: Apache-2.0
"""Conversion in a process apart: whatever a backend does there, this process goes on and says why."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake, produces, registered
from torch import nn

import blade
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, ConfigError
from blade.fallback import isolated_convert as isolate
from blade.fallback.cluster_codec import (
    constants_of,
    decode_cluster,
    encode_cluster,
    save_tensors,
)
from blade.fallback.isolated_convert import close_workers, convert_isolated
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.listing import check_nodes
from blade.report import Verdict
from blade.verification.verify import verify

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """Sizes in arithmetic, a shared weight, an infinity, a dtype and a list among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) + self.linear.weight.sum(0)
        h = h.masked_fill(h > 1, float("-inf")).softmax(-1)
        h = torch.cat([h, x.reshape(x.shape[0], x.shape[1])], dim=1) / x.shape[0]
        return h.to(torch.float64)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    from blade.capture.capture import capture
    from blade.graph.torchscript.view import view

    captured = capture(Mixed().eval(), X, blade.Config())
    graph = view(captured)
    ops = sorted({*range(len(graph.nodes))} - check_nodes(graph))
    [extracted] = extract(captured, graph, [ops])
    return extracted.cluster


@pytest.fixture
def backend() -> Iterator[Any]:
    def make(**faults: Any) -> Fake:
        made = Fake(in_process=False, **faults)
        made.register()
        return made

    yield make


def reason_of(backend: Fake, cluster: Cluster, **fields: Any) -> Reason:
    found = convert_isolated(backend, cluster, blade.Config(**fields))
    assert isinstance(found, Reason)
    assert (found.stage, found.backend, found.subject) == (Stage.CONVERT, "fake", cluster.name)
    return found


def test_a_cluster_arrives_as_it_was(cluster: Cluster, tmp_path: Any) -> None:
    save_tensors(cluster, tmp_path / "tensors.pt")
    copy = decode_cluster(encode_cluster(cluster), tmp_path / "tensors.pt")
    assert copy.gm.code == cluster.gm.code
    for mine, theirs in zip(copy.gm.graph.nodes, cluster.gm.graph.nodes, strict=True):
        assert str(mine.meta.get("val")) == str(theirs.meta.get("val"))
        assert mine.meta.get("source") == theirs.meta.get("source")
    guards = [str(guard.expr) for guard in cluster.shape_env.guards]
    assert [str(guard.expr) for guard in copy.shape_env.guards] == guards
    assert (copy.name, copy.inputs, copy.ops) == (cluster.name, cluster.inputs, cluster.ops)
    for mine, theirs in ((copy.samples, cluster.samples), (copy.probes, cluster.probes)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for (x,) in [*cluster.samples, *cluster.probes]:
        assert torch.equal(copy.gm(x)[0], cluster.gm(x)[0])


def test_a_small_view_travels_without_the_rest(cluster: Cluster, tmp_path: Any) -> None:
    large = torch.randn(1000, 1000)
    one = Cluster("c", cluster.gm, cluster.shape_env, cluster.inputs, (), [(large[:2, :6],)])
    save_tensors(one, tmp_path / "tensors.pt", with_constants=False)
    assert (tmp_path / "tensors.pt").stat().st_size < 10_000


def test_the_engine_works_here_and_holds_the_clusters_own_constants(
    cluster: Cluster, backend: Any
) -> None:
    engine: Any = convert_isolated(backend(), cluster, blade.Config(max_failures=7))
    assert isinstance(verify(cluster, engine, cluster.gm, "fake"), Verdict)
    _, words, numbers, tensors = engine._get_method("__getstate__")()
    assert words[:2] == ["cluster_0", "fake"]
    assert numbers["max_failures"] == 7
    own = {t.data_ptr() for t in constants_of(cluster).values()}
    assert own
    assert {t.data_ptr() for t in tensors[1:]} == own


def test_workers_are_reused(cluster: Cluster, backend: Any) -> None:
    pids = set()
    for _ in range(2):
        assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)
        [worker] = isolate._idle
        pids.add(worker.pid)
    assert len(pids) == 1


@produces(Code.CONVERSION_FAILED)
def test_an_exception_there(cluster: Cluster, backend: Any) -> None:
    reason = reason_of(backend(convert=fakes.fails_to_convert), cluster)
    assert reason.code is Code.CONVERSION_FAILED
    assert reason.detail == (
        "fake raised ValueError in the stage 'convert': no idea what to do with this"
    )
    assert reason.error is not None
    assert "in fails_to_convert" in reason.error
    with pytest.raises(BackendError, match="no idea what to do with this"):
        convert_isolated(
            backend(convert=fakes.fails_to_convert), cluster, blade.Config(strict=True)
        )


def test_a_refusal_is_a_decision_even_if_strict(cluster: Cluster, backend: Any) -> None:
    reason = reason_of(backend(convert=fakes.refuses_to_convert), cluster, strict=True)
    assert (reason.code, reason.detail) == (Code.UNSUPPORTED_DTYPE, "Not in this precision.")


def test_what_is_the_users_to_see_is_seen(cluster: Cluster, backend: Any) -> None:
    with pytest.raises(ConfigError, match="this backend has no int8"):
        convert_isolated(backend(convert=fakes.wants_another_config), cluster, blade.Config())
    assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)


def test_several_conversions_at_once(cluster: Cluster, backend: Any) -> None:
    several = [backend(), backend(convert=fakes.crashes_converting)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda b: convert_isolated(b, cluster, blade.Config()), several))
    assert not isinstance(found[0], Reason)
    assert isinstance(found[1], Reason)
    assert found[1].code is Code.CONVERSION_CRASHED
    assert len(isolate._idle) == 1  # the other one is not kept


@produces(Code.CONVERSION_CRASHED)
@pytest.mark.parametrize(
    ("faults", "how", "wrote"),
    [
        ({"convert": fakes.crashes_converting}, "by signal 11 (SIGSEGV)", "in crashes_converting"),
        ({"convert": fakes.aborts_converting}, "by signal 6 (SIGABRT)", "operand 3 is no tensor"),
        ({"convert": fakes.exits_converting}, "with exit status 3 and no answer", "nothing"),
        ({"run": fakes.crashes}, "by signal 11 (SIGSEGV)", "in crashes"),  # the first run
    ],
)
def test_a_crash_there(
    cluster: Cluster, backend: Any, faults: dict[str, Any], how: str, wrote: str
) -> None:
    reason = reason_of(backend(**faults), cluster)
    assert reason.code is Code.CONVERSION_CRASHED
    assert reason.detail == f"fake ended the process that converts, {how}."
    assert reason.error is not None
    assert wrote in reason.error
    assert "/" not in reason.error  # no folders of this machine
    with pytest.raises(BackendError, match="ended the process"):
        convert_isolated(backend(**faults), cluster, blade.Config(strict=True))
    assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)


@produces(Code.CONVERSION_TIMEOUT)
def test_a_hang_there(cluster: Cluster, backend: Any) -> None:
    hanging = backend(convert=fakes.hangs_converting)
    reason = reason_of(hanging, cluster, conversion_deadline_s=0.5)
    assert reason.code is Code.CONVERSION_TIMEOUT
    assert reason.detail == "fake did not convert within Config.conversion_deadline_s=0.5 s."
    assert isolate._idle == []


def test_too_much_memory_there(cluster: Cluster, backend: Any) -> None:
    greedy = backend(convert=fakes.fills_memory_converting)
    reason = reason_of(greedy, cluster, conversion_memory_mb=512)
    assert reason.code is Code.CONVERSION_FAILED
    assert "raised MemoryError" in reason.detail
    assert not isinstance(convert_isolated(greedy, cluster, blade.Config()), Reason)


def test_a_backend_that_cannot_be_sent(cluster: Cluster, backend: Any) -> None:
    reason = reason_of(backend(convert=lambda cluster: None), cluster)
    assert reason.code is Code.CONVERSION_FAILED
    assert "cannot be sent to the process that converts" in reason.detail
    assert "in_process = True" in reason.detail


def test_a_worker_killed_while_it_waits_is_replaced(cluster: Cluster, backend: Any) -> None:
    assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)
    [worker] = isolate._idle
    os.killpg(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)


def test_nothing_is_left_running(cluster: Cluster, backend: Any) -> None:
    assert not isinstance(convert_isolated(backend(), cluster, blade.Config()), Reason)
    [worker] = isolate._idle
    pid = worker.pid
    del worker
    close_workers()
    gc.collect()
    for _ in range(100):
        if not _alive_in_group(pid):
            break
        time.sleep(0.05)
    assert not _alive_in_group(pid)


def _alive_in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@produces(Code.CONVERSION_CRASHED)
def test_a_crashing_node_does_not_cost_the_rest() -> None:
    model = Mixed().eval()
    backend = Fake(convert=fakes.crashes_converting, spoils=["aten::masked_fill"], in_process=False)
    with registered(backend):
        config = blade.Config(optimization_pipeline="fake", timing=False, min_cluster_size=1)
        optimized = blade.optimize(model, X, config)
    report = blade.report(optimized)
    [reason] = [r for r in report.all_reasons() if r.code is Code.CONVERSION_CRASHED]
    assert "aten::masked_fill" in reason.subject
    assert report.outside == {"aten::masked_fill": 1}
    for rows in (4, 1, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(optimized(x), model(x))
    assert all(s["fallbacks"] == 0 for s in blade.stats(optimized).values())

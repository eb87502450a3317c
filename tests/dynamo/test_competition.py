# SPDX-License-Identifier: Apache-2.0
"""Several backends take a cluster of a compiled graph: at the first call the fastest of those that are right wins."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fake_backends as fakes
import graphs
import pytest
import torch
from fake_backends import Fake, Watched, produces, registered
from torch import nn
from torch.nn import functional

from blade.backends import registry
from blade.core.reason import Code
from blade.dynamo import aot_disc, compete, disc
from blade.fallback.isolated_convert import close_workers
from blade.report import ORIGINAL, ClusterReport, Timing
from blade.selection import build_candidates

ONNX_RUNTIME = registry._BUILT_IN["onnxruntime"]
pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _only_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BLADE_BACKENDS")
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    yield
    close_workers()  # no process waits for further conversions: other tests count the children


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], None]:
    """How much faster than the original each backend is, instead of clocks."""

    def start(speeds: Mapping[str, float]) -> None:
        def measure_all(runs: Any, original: Any, *given: Any, **options: Any) -> list[Timing]:
            return [Timing((), 1.0, 1.0 / speeds[run.args[0].backend], 0.0) for run in runs]

        monkeypatch.setattr(compete, "measure_all", measure_all)

    return start


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))
    return nn.Sequential(*layers).eval()


def compiled(model: Any, backend: Any = disc, **options: Any) -> Any:
    given = {"optimization_pipeline": "auto", "min_cluster_size": 1, "time_budget": None}
    return torch.compile(model, backend=backend, options={**given, **options})


def first_call(*backends: Fake, **options: Any) -> ClusterReport:
    """Of the one cluster, after two calls that were right."""
    model = mlp()
    with registered(*backends), torch.no_grad():
        run = compiled(model, **options)
        for _ in range(2):
            torch.testing.assert_close(run(X), model(X))
    [cluster] = [one for report in graphs.reports() for one in report.clusters]
    return cluster


def codes(cluster: ClusterReport) -> dict[str | None, Code]:
    return {reason.backend: reason.code for reason in cluster.reasons}


@produces(Code.SLOWER)
def test_the_fastest_serves_and_the_report_has_timings_and_reasons_of_the_others(
    race: Callable[..., None],
) -> None:
    race({"a": 1.5, "b": 3.0, "c": 0.5})
    cluster = first_call(Fake("a"), Fake("b"), Fake("c"))
    assert cluster.backend == "b"
    assert codes(cluster) == {"a": Code.NOT_FASTEST, "c": Code.SLOWER}
    tried = {one.backend: one for one in cluster.tried}
    assert [tried[name].timings[0].speedup for name in "abc"] == pytest.approx([1.5, 3.0, 0.5])
    assert [tried[name].chosen for name in "abc"] == [False, True, False]
    assert tried["a"].reason is not None and "b is 3.00x" in tried["a"].reason.detail
    assert (cluster.verdict, cluster.timings) == (tried["b"].verdict, tried["b"].timings)
    [counts] = graphs.stats().values()
    assert counts["engine_runs"] == 2


@produces(Code.WRONG_VALUES)
def test_a_wrong_engine_loses_however_fast(race: Callable[..., None]) -> None:
    race({"a": 9.0, "b": 2.0})
    cluster = first_call(Fake("a", run=fakes.wrong_values), Fake("b"))
    assert cluster.backend == "b" and codes(cluster) == {"a": Code.WRONG_VALUES}
    tried = {one.backend: one for one in cluster.tried}
    assert tried["a"].timings == () and tried["a"].reason is not None
    assert tried["b"].timings != ()


def test_as_fast_as_another_the_earlier_one_serves(race: Callable[..., None]) -> None:
    race({"a": 2.0, "b": 2.01})
    assert first_call(Fake("a"), Fake("b")).backend == "a"


def test_where_all_are_slower_or_wrong_the_original_serves(race: Callable[..., None]) -> None:
    race({"a": 0.5, "b": 0.5})
    cluster = first_call(Fake("a"), Fake("b", run=fakes.puts_nan))
    assert cluster.backend == ORIGINAL and cluster.timings == ()
    assert codes(cluster) == {"a": Code.SLOWER, "b": Code.WRONG_VALUES}


def sleeps(outputs: list[torch.Tensor], inputs: Any, call: int) -> Sequence[torch.Tensor]:
    time.sleep(0.3)
    return outputs


def test_real_clocks_tell_a_sleeper_from_the_others() -> None:
    cluster = first_call(Fake("a", run=sleeps), Fake("b"))
    assert cluster.backend in ("b", ORIGINAL)
    tried = {one.backend: one for one in cluster.tried}
    assert tried["a"].timings[0].engine_ms > tried["b"].timings[0].engine_ms
    assert codes(cluster)["a"] is Code.SLOWER


def test_conversions_in_processes_apart_run_at_once(
    race: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cluster_cache: Any
) -> None:
    cluster_cache.mkdir()
    monkeypatch.setattr(build_candidates, "size_of_pool", lambda config: 2)
    race({"a": 2.0, "b": 3.0})
    several = [
        Fake(name, convert=fakes.meets_another_converting, in_process=False) for name in "ab"
    ]
    with registered(*several), torch.no_grad():
        run = compiled(lambda x: (x * 2).tanh().softmax(-1))
        torch.testing.assert_close(run(X), (X * 2).tanh().softmax(-1))
    [report] = graphs.reports()
    assert [one.backend for one in report.clusters] == ["b"]


def test_what_fails_to_convert_does_not_keep_others_from_serving(race: Callable[..., None]) -> None:
    race({"b": 2.0})
    cluster = first_call(Fake("a", convert=fakes.fails_to_convert), Fake("b"))
    assert cluster.backend == "b" and codes(cluster) == {"a": Code.CONVERSION_FAILED}
    assert [(one.backend, one.chosen) for one in cluster.tried] == [("b", True), ("a", False)]


def test_the_node_that_no_backend_converts_is_left_out(race: Callable[..., None]) -> None:
    race({"a": 2.0, "b": 3.0})
    model = mlp()
    several = [Fake(name, chokes_on=["aten::native_layer_norm"]) for name in "ab"]
    with registered(*several), torch.no_grad():
        torch.testing.assert_close(compiled(model)(X), model(X))
    [report] = graphs.reports()
    assert report.outside == {"aten::native_layer_norm": 1}
    assert {one.backend for one in report.clusters} == {"b"}
    culprits = [r for r in report.reasons if r.code is Code.CONVERSION_FAILED]
    assert [r.backend for r in culprits] == ["a", "b"]
    assert all("Found by bisecting" in r.detail for r in culprits)


@pytest.mark.parametrize(("variable", "serves"), [("a", "a"), ("c,b", "c"), ("A, B", "b")])
def test_the_environment_says_which_backends_take_part(
    race: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str, serves: str
) -> None:
    race({"a": 2.0, "b": 3.0, "c": 4.0})
    monkeypatch.setenv("BLADE_BACKENDS", variable)
    assert first_call(Fake("a"), Fake("b"), Fake("c")).backend == serves


def test_a_named_backend_is_alone(race: Callable[..., None]) -> None:
    race({"a": 2.0, "b": 3.0})
    faster = Fake("b")
    assert first_call(Fake("a"), faster, optimization_pipeline="a").backend == "a"
    assert faster.converted == []


def test_unmeasured_the_first_that_converts_serves() -> None:
    chokes, second, third = Fake("a", convert=fakes.fails_to_convert), Fake("b"), Fake("c")
    assert first_call(chokes, second, third, timing=False).backend == "b"
    assert third.converted == []


@produces(Code.TIME_BUDGET)
def test_conversions_that_do_not_fit_the_budget_are_not_begun(race: Callable[..., None]) -> None:
    race({"a": 2.0, "b": 3.0, "c": 4.0})
    late = Fake("b", estimate_s=900)
    cluster = first_call(
        Fake("a", estimate_s=900), late, Fake("c", estimate_s=0.1), time_budget=600
    )
    assert cluster.backend == "c" and late.converted == []
    assert codes(cluster) == {"a": Code.NOT_FASTEST, "b": Code.TIME_BUDGET}


@produces(Code.TIME_BUDGET)
def test_without_time_left_the_first_that_is_right_serves(
    race: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from blade.timing.time_budget import TimeBudget

    race({"a": 2.0, "b": 3.0, "c": 4.0})
    monkeypatch.setattr(TimeBudget, "left", lambda self: 0.0)
    cluster = first_call(Fake("a", run=fakes.wrong_values), Fake("b"), Fake("c"), time_budget=600)
    assert cluster.backend == "b"
    assert codes(cluster) == {"a": Code.WRONG_VALUES, "c": Code.TIME_BUDGET}


def test_engines_that_lost_are_dropped(race: Callable[..., None]) -> None:
    race({"a": 2.0, "b": 3.0, "c": 0.5})
    several = [Watched("a"), Watched("b"), Watched("c"), Watched("d", run=fakes.wrong_values)]
    assert first_call(*several).backend == "b"
    assert all(one.loaded for one in several)
    assert [one.alive() for one in several] == [0, 1, 0, 0]


class Net(nn.Module):
    """Forward saves for backward, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(functional.gelu(self.first(x)), 0.3)
        return self.second(hidden).tanh()  # type: ignore[no-any-return]


def test_forward_and_backward_choose_on_their_own(race: Callable[..., None]) -> None:
    race({"a": 3.0, "b": 2.0, "c": 9.0})
    several = Fake("a"), Fake("b"), Fake("c", run=fakes.wrong_values)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    with registered(*several):
        runs = [compiled(nets[0], backend=aot_disc), nets[1]]
        for seed in range(3):
            found = []
            for net, run in zip(nets, runs, strict=True):
                torch.manual_seed(seed)
                x = torch.randn(6, 8, requires_grad=True)
                net.zero_grad()
                y = run(x)
                y.square().sum().backward()
                found.append([y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())])
            torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert len(graphs.made()) == 2
    assert set(graphs.served().values()) == {"a"}
    against = [codes(one) for report in graphs.reports() for one in report.clusters]
    assert all(one["c"] is Code.WRONG_VALUES for one in against), against


def test_what_the_graph_writes_is_written_once(race: Callable[..., None]) -> None:
    """The fakes know nothing of inputs that are written: they lose, and nothing is written twice."""
    race({"a": 2.0, "b": 3.0})

    def fn(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.mul_(0.5).add_((x * 2).tanh())
        return total + 1

    totals = [torch.ones(4, 16), torch.ones(4, 16)]
    with registered(Fake("a"), Fake("b")), torch.no_grad():
        run = compiled(fn)
        for _ in range(3):
            torch.testing.assert_close(run(totals[0], X), fn(totals[1], X))
            torch.testing.assert_close(totals[0], totals[1])


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_BUILT_IN", {"onnxruntime": ONNX_RUNTIME})
    yield


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("write", ["in_place", "data"])
def test_a_library_reads_parameters_as_they_are_now(_library: None, write: str) -> None:
    """Its session has folded them; of a write through ``.data`` no version counter tells."""
    model = mlp()
    with torch.no_grad():
        run = compiled(model, timing=False)
        torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-5)
        weight = model.get_parameter("0.weight")
        for seed in range(2):
            fresh = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
            (weight if write == "in_place" else weight.data).copy_(fresh)
            torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-5)
    assert graphs.served() and set(graphs.served().values()) == {"onnxruntime"}
    assert all(counts["engine_runs"] == 3 for counts in graphs.stats().values())

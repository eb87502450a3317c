# SPDX-License-Identifier: Apache-2.0
"""``auto``: every backend is a candidate, what is measured decides, and nothing is slower than the original."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake, produces, registered
from race import CALL_MS, Race, mlp, optimize

import blade
from blade.backends import registry
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, ConfigError
from blade.graph.torchscript import extract
from blade.graph.torchscript.boundary import Boundary
from blade.graph.torchscript.to_fx import to_fx
from blade.graph.torchscript.view import GraphView
from blade.report import ORIGINAL, Report
from blade.selection import build_candidates as candidates
from blade.selection.plan import assemble as compose
from blade.selection.plan import select
from blade.timing.time_budget import TimeBudget

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Race]:
    def start(speeds: Mapping[str, float], **more: Any) -> Race:
        made = Race(speeds, **more)
        monkeypatch.setattr(select, "measure_all", made.measure_each)
        monkeypatch.setattr(compose, "measure_all", made.measure_all)
        return made

    return start


@pytest.fixture(autouse=True)
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BLADE_BACKENDS")
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    yield


def served(report: Report) -> list[str]:
    return [c.backend for c in report.clusters]


def reasons(report: Report, code: Code) -> list[Reason]:
    return [r for r in report.all_reasons() if r.code is code]


@produces(Code.SLOWER, Code.NOT_FASTEST)
def test_the_fastest_of_all_serves_and_the_report_lists_every_one(
    race: Callable[..., Race],
) -> None:
    race({"a": 1.5, "b": 3.0, "c": 0.5})
    _, report = optimize(Fake("a"), Fake("b"), Fake("c"), Fake("d", run=fakes.wrong_values))
    [cluster] = report.clusters
    assert cluster.backend == "b"
    tried = {one.backend: one for one in cluster.tried}
    assert list(tried) == ["a", "b", "c", "d"]
    assert [one.chosen for one in tried.values()] == [False, True, False, False]
    assert [one.timings[0].speedup for one in cluster.tried[:3]] == [1.5, 3.0, 0.5]
    assert tried["d"].timings == ()
    codes = {name: one.reason and one.reason.code for name, one in tried.items()}
    assert codes == {"a": Code.NOT_FASTEST, "b": None, "c": Code.SLOWER, "d": Code.WRONG_VALUES}
    assert tried["b"].verdict == cluster.verdict
    assert tried["d"].verdict is None
    assert Report.from_json(report.to_json()) == report
    assert report.timings[0].speedup == pytest.approx(10 / (10 - 5 * 2 / 3 + CALL_MS))


def test_as_fast_as_another_the_earlier_one_serves(race: Callable[..., Race]) -> None:
    race({"a": 2.0, "b": 2.01})
    assert served(optimize(Fake("a"), Fake("b"))[1]) == ["a"]
    assert served(optimize(Fake("b"), Fake("a"))[1]) == ["b"]


@pytest.mark.parametrize(
    ("variable", "serves"), [("a, B", "b"), ("a", "a"), ("c,a", "c"), ("", ORIGINAL)]
)
def test_the_environment_restricts_auto(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch, variable: str, serves: str
) -> None:
    race({"a": 2.0, "b": 3.0, "c": 4.0})
    monkeypatch.setenv("BLADE_BACKENDS", variable)
    _, report = optimize(Fake("a"), Fake("b"), Fake("c"))
    assert served(report) == ([serves] if variable else [])


def test_the_environment_names_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLADE_BACKENDS", "a,tensorflow")
    with pytest.raises(ConfigError, match=r"no backend 'tensorflow'\. Known are: a"):
        optimize(Fake("a"))


def test_a_named_backend_is_alone_and_must_be_there(race: Callable[..., Race]) -> None:
    race({"a": 2.0, "b": 3.0})
    faster = Fake("b")
    _, report = optimize(Fake("a"), faster, optimization_pipeline="A")
    assert served(report) == ["a"]
    assert faster.converted == []
    with pytest.raises(BackendError, match="It is not installed"):
        optimize(Fake("a", unavailable="It is not installed."), optimization_pipeline="a")


@produces(Code.BACKEND_UNAVAILABLE)
def test_lossy_backends_are_looked_at_where_that_is_allowed(race: Callable[..., Race]) -> None:
    race({"a": 2.0, "int8": 9.0})
    lossy = Fake("int8", reduced_precision=True)
    lossy.precisions = ("int8",)
    _, report = optimize(Fake("a"), lossy)
    assert served(report) == ["a"]
    [reason] = reasons(report, Code.BACKEND_UNAVAILABLE)
    assert "which Config(enable_int8=True) allows" in reason.detail
    assert served(optimize(Fake("a"), lossy, enable_int8=True)[1]) == ["int8"]


def in_half(**fields: Any) -> Report:
    """Of the one backend "half", whose values are 1e-3 off, as Config(enable_fp16=True) permits."""
    half = Fake("half", run=fakes.wrong_values)
    half.precisions, half.reduced_precision_with = ("fp16",), ("enable_fp16",)
    config = blade.Config(min_cluster_size=1, time_budget=None, **fields)
    with registered(half):
        return blade.report(blade.optimize(mlp(), X, config))


def test_an_exact_backend_may_be_permitted_to_lose_accuracy(race: Callable[..., Race]) -> None:
    race({"half": 9.0})
    report = in_half()
    assert served(report) == [ORIGINAL] and reasons(report, Code.WRONG_VALUES)
    assert served(in_half(enable_fp16=True)) == ["half"]
    report = in_half(enable_fp16=True, accuracy_budget=1e-4)
    assert served(report) == [ORIGINAL] and reasons(report, Code.ACCURACY)


@pytest.mark.parametrize(("drop", "serves"), [(1.0, "half"), (1e-5, ORIGINAL)])
def test_a_metric_judges_whatever_loses_accuracy(
    race: Callable[..., Race], drop: float, serves: str
) -> None:
    race({"half": 9.0})

    def nearness(outputs: list[torch.Tensor], labels: list[torch.Tensor]) -> float:
        return -float((outputs[0] - labels[0]).norm() / labels[0].norm())

    metric = {"metric": nearness, "samples": [(X, mlp()(X).detach())], "drop": drop}
    assert served(in_half(enable_fp16=True, accuracy_budget=metric)) == [serves]


def test_partitions_and_what_they_share_is_built_once(race: Callable[..., Race]) -> None:
    """a takes all but the norm, b all but the last product, c everything."""
    made = race({"a": 1.5, "b": 1.4, "c": 1.2}, call_ms={"a": 0.01})
    several = [
        Fake("a", refuses=["aten::layer_norm"]),
        Fake("b", refuses=["aten::softmax"]),
        Fake("c"),
    ]
    _, report = optimize(*several)
    converted = {fake.name: fake.converted for fake in several}
    assert all(len(set(kinds)) == len(kinds) for kinds in converted.values())
    assert ("aten::linear", "aten::gelu") in map(tuple, converted["a"])
    assert max(map(len, converted["c"])) == 5
    assert {one.name for one in report.compositions} >= {"mixture", "a"}
    [chosen] = [one for one in report.compositions if one.chosen]
    assert chosen.timings == report.timings
    speeds = [one.timings[0].speedup for one in report.compositions]
    assert max(speeds) <= chosen.timings[0].speedup * 1.02  # a simpler one that is as fast
    assert len(made.raced) == len(report.compositions)
    assert sorted(chosen.engines.values()) == sorted(c.backend for c in report.clusters)


@produces(Code.SLOWER)
def test_fast_alone_and_slow_together_does_not_serve(race: Callable[..., Race]) -> None:
    race({"a": 2.0}, call_ms={"a": 9.0})
    optimized, report = optimize(Fake("a", refuses=["aten::softmax"]))
    assert served(report) == [ORIGINAL]
    [reason] = reasons(report, Code.SLOWER)
    assert (reason.subject, reason.backend) == ("the whole module", None)
    assert "Put together as 'mixture' (cluster_0: a), " in reason.detail
    assert blade.stats(optimized) == {}
    [composed] = report.compositions
    assert not composed.chosen
    assert report.timings == ()


def test_a_single_backend_may_beat_the_mixture_of_winners(race: Callable[..., Race]) -> None:
    """b wins its clusters, but costs so much beside its work that a alone is faster as a whole."""
    race({"a": 2.0, "b": 2.2}, call_ms={"b": 0.8})
    several = Fake("a"), Fake("b", refuses=["aten::layer_norm", "aten::gelu"])
    _, report = optimize(*several)
    assert set(served(report)) == {"a"}


def test_never_slower_whatever_the_backends_do() -> None:
    """With the real clock: sleepers, liars, and those that break when loaded or run."""
    several = [
        Fake("sleeps", run=fakes.is_slow),
        Fake("lies", run=fakes.wrong_values),
        Fake("shape", run=fakes.wrong_shape),
        Fake("raises", run=fakes.raises),
        Fake("chokes", convert=fakes.fails_to_convert),
        Fake("breaks", in_process=False, run=fakes.crashes),
    ]
    optimized, report = optimize(*several, timing_repeats=3)
    assert set(served(report)) == {ORIGINAL}
    assert blade.stats(optimized) == {}
    against = {one.backend: one.reason for one in report.clusters[0].tried}
    assert list(against) == [fake.name for fake in several]
    assert against["breaks"] is not None
    assert against["breaks"].code is Code.CONVERSION_CRASHED
    assert against["sleeps"] is not None
    assert against["sleeps"].code is Code.SLOWER


@produces(Code.TIME_BUDGET)
def test_what_does_not_fit_the_budget_is_not_begun(race: Callable[..., Race]) -> None:
    race({"a": 2.0, "b": 3.0, "c": 4.0})
    first, second, third = (
        Fake("a", estimate_s=900),
        Fake("b", estimate_s=900),
        Fake("c", estimate_s=0.1),
    )
    _, report = optimize(first, second, third, time_budget=60)
    assert served(report) == ["c"]
    assert first.converted  # the first one always is
    assert second.converted == []
    [reason, whole] = reasons(report, Code.TIME_BUDGET)[::-1]
    assert "cut short by Config.time_budget" in whole.detail
    assert (reason.stage, reason.backend, reason.subject) == (Stage.CONVERT, "b", "cluster_0")
    assert "about 900 s" in reason.detail
    assert "Config.time_budget=60 are left" in reason.detail
    assert re.search(r"time_budget=1[2-9]\d\d or more, or None, would let it", reason.detail)
    assert served(optimize(first, second, time_budget=None)[1]) == ["b"]


@produces(Code.TIME_BUDGET)
def test_a_conversion_that_outlasts_the_budget_is_ended(race: Callable[..., Race]) -> None:
    race({"a": 2.0, "b": 3.0})
    hangs = Fake("b", convert=fakes.hangs_converting, in_process=False)
    _, report = optimize(Fake("a"), hangs, time_budget=4)
    assert served(report) == ["a"]
    [reason, whole] = reasons(report, Code.TIME_BUDGET)[::-1]
    assert "cut short by Config.time_budget" in whole.detail
    assert "Config.time_budget=4 s ended before it was converted" in reason.detail


@produces(Code.TIME_BUDGET)
def test_without_time_left_the_first_is_measured_and_the_others_are_not(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch
) -> None:
    race({"a": 2.0, "b": 3.0})
    # Conversions are held to the real clock: their share of the budget must last on a busy machine.
    monkeypatch.setattr(TimeBudget, "left", lambda self: 0.0 if self.seconds else math.inf)
    _, report = optimize(Fake("a"), Fake("b"), time_budget=500)
    assert served(report) == ["a"]
    [reason, whole] = reasons(report, Code.TIME_BUDGET)[::-1]
    assert "cut short by Config.time_budget" in whole.detail
    assert reason.stage is Stage.SELECT
    assert "ended before it was measured" in reason.detail


@produces(Code.TIME_BUDGET)
def test_without_time_left_only_the_largest_cluster_is_converted(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one gets no form in FX either, and nothing is bisected."""
    race({"a": 2.0, "b": 3.0})
    converted = []

    def counted(view: GraphView, boundary: Boundary, *given: Any) -> Any:
        converted.append(len(boundary.nodes))
        return to_fx(view, boundary, *given)

    monkeypatch.setattr(extract, "to_fx", counted)
    monkeypatch.setattr(TimeBudget, "_until", lambda self, part: 0.0 if self.seconds else math.inf)
    two = Fake("a", refuses=("aten::gelu",)), Fake("b", refuses=("aten::gelu",))
    _, report = optimize(*two, time_budget=500)
    assert sorted(served(report)) == ["a", ORIGINAL]
    assert [len(one.converted) for one in two] == [1, 0]
    assert converted == [3]  # of linear | layer_norm, linear, softmax
    late = {
        (r.backend, "ended before it was converted" in r.detail)
        for r in reasons(report, Code.TIME_BUDGET)
    }
    assert ("a", True) in late and ("b", False) in late


def test_the_first_engines_of_all_clusters_have_twice_the_time(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch
) -> None:
    race({"a": 2.0, "b": 3.0})
    monkeypatch.setattr(
        TimeBudget, "_until", lambda self, part: max(0.0, part - 1.5) if self.seconds else math.inf
    )
    two = Fake("a", refuses=("aten::gelu",)), Fake("b", refuses=("aten::gelu",))
    _, report = optimize(*two, time_budget=500)
    assert served(report) == ["a", "a"]
    assert [len(one.converted) for one in two] == [2, 0]


def test_conversions_in_processes_apart_run_at_once(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch, cluster_cache: Any
) -> None:
    cluster_cache.mkdir()
    monkeypatch.setattr(candidates, "size_of_pool", lambda config: 2)
    race({"a": 2.0, "b": 3.0})
    several = [
        Fake(name, convert=fakes.meets_another_converting, in_process=False) for name in "ab"
    ]
    _, report = optimize(*several, time_budget=None)
    assert served(report) == ["b"]
    assert len(report.clusters[0].tried[0].timings) == 1


def test_different_winners_at_different_sizes_share_a_cluster(
    race: Callable[..., Race], tmp_path: Any
) -> None:
    race({}).at = lambda backend, rows: 4.0 if (backend == "few") == (rows <= 8) else 0.5
    few, many = Fake("few", in_process=False), Fake("many", in_process=False)
    samples = [torch.randn(2, 16), torch.randn(64, 16)]
    model = mlp()
    with registered(few, many):
        optimized = blade.optimize(model, samples, blade.Config(min_cluster_size=1))
        [cluster] = blade.report(optimized).clusters
        assert cluster.backend == "few+many"
        assert cluster.sizes == "x0.size(0) <= 11: few, else many"
        assert [one.chosen for one in cluster.tried] == [True, True]
        assert "if torch.le(size, 11):" in optimized.cluster_0.code
        torch.jit.save(optimized, tmp_path / "model.pt")
        for module in (optimized, torch.jit.load(tmp_path / "model.pt")):
            with torch.no_grad():
                for rows in (1, 11, 12, 80, 3):
                    x = torch.randn(rows, 16)
                    torch.testing.assert_close(module(x), model(x))
                torch.testing.assert_close(module(X[0]), model(X[0]))  # of another rank
            blade.rearm(module)
            found = blade.stats(module)
            assert [found[name]["engine_runs"] for name in ("cluster_0", "cluster_0/many")] == [
                3,
                2,
            ]
        assert Report.from_json(blade.report(optimized).to_json()) == blade.report(optimized)


@pytest.mark.parametrize(("weights", "serves"), [([9, 1], "few"), ([1, 9], "many"), (None, "few")])
def test_weights_say_which_sample_counts(
    race: Callable[..., Race], monkeypatch: pytest.MonkeyPatch, weights: Any, serves: str
) -> None:
    monkeypatch.setattr(select, "find_size_dispatch", lambda *inputs: None)  # one for all sizes
    race({}).at = lambda backend, rows: {("few", 2): 4.0, ("many", 64): 3.0}.get(
        (backend, rows), 1.0
    )
    samples = [torch.randn(2, 16), torch.randn(64, 16)]
    _, report = optimize(Fake("few"), Fake("many"), inputs=samples, sample_weights=weights)
    assert served(report) == [serves]


def test_as_many_weights_as_samples() -> None:
    with pytest.raises(ConfigError, match="sample_weights has 2 entries; there are 1 samples"):
        optimize(Fake("a"), sample_weights=[1, 2])


def test_in_process_failures_are_bisected_although_others_serve(race: Callable[..., Race]) -> None:
    """A node that the compiler cannot take does not cost it the rest."""
    race({"a": 3.0, "b": 1.5})
    chokes = Fake("a", chokes_on=["aten::layer_norm"])
    _, report = optimize(chokes, Fake("b"))
    [blamed] = [r for r in reasons(report, Code.CONVERSION_FAILED) if "bisecting" in r.detail]
    assert "aten::layer_norm" in blamed.subject
    assert "a" in served(report)


def test_a_cluster_that_is_the_whole_module_is_timed_once(race: Callable[..., Race]) -> None:
    made = race({"a": 2.0})
    _, report = optimize(Fake("a"))
    assert served(report) == ["a"] and made.raced == []
    [timing] = report.timings  # eager mode is timed for the module, not for a cluster
    assert (replace(timing, eager_ms=None),) == report.clusters[0].timings
    assert report.timings[0].shapes == (tuple(X.shape),)


def test_what_has_something_around_it_is_timed_as_a_whole_too(race: Callable[..., Race]) -> None:
    made = race({"a": 2.0})
    _, report = optimize(Fake("a", refuses=["aten::softmax"]))
    assert served(report) == ["a"] and len(made.raced) == 1
    assert report.timings != report.clusters[0].timings


def test_backends_are_told_where_the_model_is(race: Callable[..., Race]) -> None:
    race({"a": 2.0})
    told: list[torch.device] = []
    curious = Fake("a")
    curious.warm_up = told.append  # type: ignore[method-assign]
    optimize(curious)
    assert told == [torch.device("cpu")]

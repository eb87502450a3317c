# SPDX-License-Identifier: Apache-2.0
"""The second optimize of a model loads what was chosen, whoever was chosen; what failed is not tried again."""

from dataclasses import replace
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake, produces
from race import Race, optimize

from blade.backends import registry
from blade.core.disk_cache import open_cache
from blade.core.reason import Code
from blade.report import ORIGINAL
from blade.selection.cache.section import DECISIONS, ENGINES
from blade.selection.plan import assemble as compose
from blade.selection.plan import select
from blade.verification import verify

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.usefixtures("cluster_cache")]


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> Race:
    """Of backends a, b and c."""
    monkeypatch.delenv("BLADE_BACKENDS")
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    made = Race({"a": 2.0, "b": 3.0, "c": 1.5})
    monkeypatch.setattr(select, "measure_all", made.measure_each)
    monkeypatch.setattr(compose, "measure_all", made.measure_all)
    return made


def only_loading(patch: pytest.MonkeyPatch) -> None:
    """From now on nothing may be compiled, verified, measured or run for its samples."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("done before")

    patch.setattr(verify, "_verify", never)
    patch.setattr(select, "measure_all", never)
    patch.setattr(compose, "measure_all", never)
    patch.setattr("blade.partition.assignment.cluster_blocks", never)
    patch.setattr("blade.graph.torchscript.boundary_samples.observe_tensors", never)


def versioned(name: str, **faults: Any) -> Fake:
    return Fake(name, version="1", **faults)


def test_what_was_chosen_is_loaded_and_the_report_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One cluster in an engine, one that nobody serves: the original is kept as well."""
    several = [
        versioned("a", refuses=["aten::layer_norm"]),
        versioned("b", run=fakes.wrong_values),
        versioned("c", refuses=["aten::softmax", "aten::gelu"]),
    ]
    _, first = optimize(*several)
    count = [len(fake.converted) for fake in several]
    only_loading(monkeypatch)
    _, second = optimize(*several)
    assert [len(fake.converted) for fake in several] == count
    assert replace(second, seconds={}, date="") == replace(first, seconds={}, date="")
    assert any(c.backend != ORIGINAL for c in second.clusters)


def test_a_table_is_loaded(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    race.at = lambda backend, rows: 4.0 if (backend == "a") == (rows <= 8) else 0.5
    samples = [torch.randn(2, 16), torch.randn(64, 16)]
    several = versioned("a"), versioned("b")
    _, first = optimize(*several, inputs=samples)
    only_loading(monkeypatch)
    optimized, second = optimize(*several, inputs=samples)
    assert first.clusters[0].sizes == "x0.size(0) <= 11: a, else b"
    assert second.clusters == first.clusters
    assert "torch.le(size, 11)" in optimized.cluster_0.code


def test_what_was_refused_is_not_converted_again() -> None:
    right = versioned("a")
    wrong, chokes = versioned("b", run=fakes.wrong_values), versioned("c", chokes_on=["aten::gelu"])
    _, first = optimize(right, wrong, chokes)
    wrong.converted.clear()
    chokes.converted.clear()
    forget()
    _, second = optimize(right, wrong, chokes)
    assert wrong.converted == []
    # only what bisecting tried, and what was right
    assert all("aten::gelu" not in kinds for kinds in chokes.converted)
    told = [{(r.backend, r.code, r.detail) for r in one.all_reasons()} for one in (first, second)]
    assert told[0] == told[1]
    with pytest.raises(ValueError, match="no idea what to do"):
        optimize(chokes, strict=True, optimization_pipeline="c")


def forget() -> None:
    """The decision, not the engines."""
    cache = open_cache()
    assert cache is not None
    for entry in (cache.folder / DECISIONS.kind).glob("*/*"):
        entry.unlink()


def test_a_search_that_ran_out_of_time_goes_on_the_next_time() -> None:
    slow = versioned("b", estimate_s=900)
    first = versioned("a")
    assert optimize(first, slow, time_budget=60)[1].clusters[0].backend == "a"
    _, report = optimize(first, slow, time_budget=None)
    assert report.clusters[0].backend == "b"
    assert Code.TIME_BUDGET not in {r.code for r in report.all_reasons()}
    assert len(first.converted) == 1
    _, report = optimize(first, slow, time_budget=60)  # what is there takes no time
    assert report.clusters[0].backend == "b"


@produces(Code.TIME_BUDGET)
def test_of_a_search_cut_short_the_best_is_loaded_until_there_is_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, first = versioned("b", estimate_s=900), versioned("a")
    _, report = optimize(first, slow, time_budget=60)
    [told] = [r for r in report.reasons if r.code is Code.TIME_BUDGET]
    assert "cut short by Config.time_budget=60 s: 1 engines were neither built nor" in told.detail
    with monkeypatch.context() as patch:
        only_loading(patch)
        for seconds in (60, 5):
            _, again = optimize(first, slow, time_budget=seconds)
            assert replace(again, seconds={}, date="") == replace(report, seconds={}, date="")
    _, report = optimize(first, slow, time_budget=6000)
    assert report.clusters[0].backend == "b"
    assert Code.TIME_BUDGET not in {r.code for r in report.all_reasons()}
    assert (len(first.converted), len(slow.converted)) == (1, 1)


@produces(Code.TIME_BUDGET)
def test_what_cut_a_search_short_may_be_about_no_cluster_that_was_chosen() -> None:
    """c was to try other cuts of the graph than the one that serves."""
    several = versioned("a"), versioned("c", refuses=["aten::gelu"], estimate_s=900)
    _, report = optimize(*several, time_budget=60)
    assert [c.backend for c in report.clusters] == ["a"]
    [told] = [r for r in report.all_reasons() if r.code is Code.TIME_BUDGET]
    assert "cut short" in told.detail


def test_other_weights_decide_anew_over_the_same_engines(race: Race) -> None:
    race.at = lambda backend, rows: 4.0 if (backend == "a") == (rows <= 8) else 1.0
    samples = [torch.randn(2, 16), torch.randn(64, 16)]
    several = versioned("a"), versioned("b")
    chosen = [
        optimize(*several, inputs=samples, sample_weights=w)[1].clusters[0].backend
        for w in ([500, 1], [1, 500])
    ]
    assert chosen == ["a", "b"]
    assert [len(fake.converted) for fake in several] == [1, 1]


@pytest.mark.parametrize("missing", ["engine", "version"])
def test_without_all_of_it_the_search_starts_again(missing: str) -> None:
    a, b = versioned("a"), versioned("b")
    optimize(a, b)
    if missing == "engine":
        cache = open_cache()
        assert cache is not None
        for entry in (cache.folder / ENGINES.kind).glob("*/*"):
            entry.unlink()
    else:
        b.version = "2"
    _, report = optimize(a, b)
    assert report.clusters[0].backend == "b"
    assert len(b.converted) == 2


def test_the_original_is_no_decision_to_keep(race: Race) -> None:
    race.speeds = {"a": 0.5}
    fake = versioned("a")
    assert optimize(fake)[1].clusters[0].backend == ORIGINAL
    race.speeds = {"a": 2.0}  # it was a busy moment
    assert optimize(fake)[1].clusters[0].backend == "a"
    assert len(fake.converted) == 1

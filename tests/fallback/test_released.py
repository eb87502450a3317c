# SPDX-License-Identifier: Apache-2.0
"""What lost is gone when ``optimize`` returns: its engines, and what they had loaded."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Watched
from race import Race, X, mlp, optimize

import blade
from blade import api
from blade.backends import registry
from blade.selection.candidate_builder import CandidateBuilder
from blade.selection.plan import assemble as compose
from blade.selection.plan import select

pytestmark = pytest.mark.needs("runtime")


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    monkeypatch.delenv("BLADE_BACKENDS")
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    made = Race({"a": 2.0, "b": 3.0, "c": 0.5})
    monkeypatch.setattr(select, "measure_all", made.measure_each)
    monkeypatch.setattr(compose, "measure_all", made.measure_all)
    yield made


def test_only_the_engines_that_serve_are_left() -> None:
    several = [
        Watched("a", refuses=["aten::layer_norm"]),
        Watched("b", refuses=["aten::gelu"]),
        Watched("c"),
        Watched("d", run=fakes.wrong_values),
    ]
    optimized, report = optimize(*several)
    serving = [c.backend for c in report.clusters]
    assert "b" in serving and "c" not in serving
    assert len(several[0].loaded) + len(several[1].loaded) > len(serving)  # some have lost
    assert {one.name: one.alive() for one in several} == {
        one.name: serving.count(one.name) for one in several
    }
    del optimized
    assert sum(one.alive() for one in several) == 0


def test_what_serves_by_size_is_all_there_is(race: Race) -> None:
    race.at = lambda backend, rows: 4.0 if (backend == "a") == (rows <= 8) else 0.5
    several = [Watched("a"), Watched("b"), Watched("c")]
    optimized, report = optimize(*several, inputs=[torch.randn(2, 16), torch.randn(64, 16)])
    assert report.clusters[0].backend == "a+b"
    assert [one.alive() for one in several] == [1, 1, 0]
    assert blade.stats(optimized)


def test_where_the_original_wins_nothing_is_left(race: Race) -> None:
    race.speeds = {"a": 0.5}
    loser = Watched("a")
    optimized, _ = optimize(loser)
    assert loser.loaded and loser.alive() == 0
    torch.testing.assert_close(optimized(X), mlp()(X))


def test_the_inputs_recorded_for_trying_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of every cluster at every sample."""
    builders: list[weakref.ref[Any]] = []

    def made(*given: Any) -> CandidateBuilder:
        builder = CandidateBuilder(*given)
        builders.append(weakref.ref(builder.samples))
        return builder

    monkeypatch.setattr(api, "CandidateBuilder", made)
    optimized, _ = optimize(Watched("a"), Watched("b"))
    gc.collect()
    assert [one() for one in builders] == [None]
    assert blade.stats(optimized)

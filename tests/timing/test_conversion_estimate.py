# SPDX-License-Identifier: Apache-2.0
"""estimate: a backend's guess, corrected by what conversions took."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_backends import Fake

from blade.config import Config
from blade.timing.conversion_estimate import LARGEST, estimate_s, record_seconds


class Guesses(Fake):
    """Ten seconds and one per op."""

    def __init__(self, version: str | None = "1") -> None:
        super().__init__("guesses", version=version)

    def estimate_s(self, cluster: Any) -> float:
        return 10.0 + len(cluster.ops)


def of(ops: int) -> Any:
    return SimpleNamespace(ops=("aten::relu",) * ops)


def test_what_conversions_took_corrects_the_next_estimate(cluster_cache: Any) -> None:
    backend = Guesses()
    assert estimate_s(backend, of(10), Config()) == 20
    record_seconds(backend, of(10), 5.0, Config())
    assert estimate_s(backend, of(10), Config()) == pytest.approx(5)
    assert estimate_s(backend, of(30), Config()) == pytest.approx(10)
    record_seconds(
        backend, of(30), 40.0, Config()
    )  # four times as long as thought: half of that, as a factor
    assert estimate_s(backend, of(30), Config()) == pytest.approx(20)
    again = Guesses("2")
    assert estimate_s(again, of(10), Config()) == 20  # another version


def test_an_accident_is_bounded_and_damage_is_not_believed(cluster_cache: Any) -> None:
    from blade.core.disk_cache import open_cache
    from blade.timing import conversion_estimate as estimate

    backend = Guesses()
    record_seconds(backend, of(10), 1e9, Config())
    assert estimate_s(backend, of(10), Config()) == pytest.approx(20 * LARGEST)
    cache, key = open_cache(), estimate._key(backend)
    assert cache is not None
    assert key is not None
    for data in (b"NaN", b'"soon"', b"-3.0", b"0.0"):
        cache.put(estimate.KIND, key, data)
        assert estimate_s(backend, of(10), Config()) == 20


def test_nothing_is_remembered_without_a_version_a_cache_or_an_estimate(cluster_cache: Any) -> None:
    nameless = Guesses(None)
    backend = Guesses()
    silent = Fake("silent", version="1")
    record_seconds(nameless, of(10), 5.0, Config())
    record_seconds(backend, of(10), 5.0, Config(cache=False))
    record_seconds(silent, of(10), 5.0, Config())
    assert estimate_s(nameless, of(10), Config()) == 20
    assert estimate_s(backend, of(10), Config()) == 20
    assert estimate_s(silent, of(10), Config()) == 0

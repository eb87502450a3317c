# SPDX-License-Identifier: Apache-2.0
"""Sections of the caches: an entry is found again under its key alone, and only while it can be trusted."""

from pathlib import Path

import pytest
import torch

from blade.config import Config
from blade.core.disk_cache import untrusted
from blade.core.reason import Code
from blade.selection.cache import fingerprint, section
from blade.selection.cache.fingerprint import make_key
from blade.selection.cache.section import (
    DECISIONS,
    ENGINES,
    FACTS,
    REFUSALS,
    TRACES,
    Section,
    sections_off,
)

CONFIG = Config()
ALL = [ENGINES, REFUSALS, DECISIONS, TRACES, FACTS]
every_section = pytest.mark.parametrize("one", ALL, ids=lambda one: one.kind)


def key_of(text: str = "graph", config: Config | None = CONFIG) -> str:
    key = make_key("model", lambda: [text], config)
    assert key is not None
    return key


def found(one: Section, key: str | None, config: Config = CONFIG) -> bytes | None:
    return one.look_up(config, key, lambda data: data, "model")


def entry(root: Path, one: Section) -> Path:
    return root / one.kind / key_of()[:2] / key_of()


@every_section
def test_what_is_kept_is_found_in_its_section_alone(one: Section, cluster_cache: Path) -> None:
    one.keep(CONFIG, key_of(), b"data")
    assert [found(other, key_of()) for other in ALL] == [
        b"data" if other is one else None for other in ALL
    ]
    assert entry(cluster_cache, one).exists()
    assert found(one, key_of("another graph")) is None
    assert found(one, key_of(), CONFIG.evolve(cache=False)) is None


@every_section
def test_what_another_version_of_the_code_kept_is_ignored(
    one: Section, cluster_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.keep(CONFIG, key_of(), b"data")
    monkeypatch.setattr(fingerprint, "code_version", lambda: "another")
    assert found(one, key_of()) is None


@every_section
def test_what_others_may_have_written_is_refused(one: Section, cluster_cache: Path) -> None:
    one.keep(CONFIG, key_of(), b"data")
    entry(cluster_cache, one).chmod(0o666)
    assert found(one, key_of()) is None
    [reason] = untrusted()
    assert reason.code is Code.CACHE_UNTRUSTED and key_of() in reason.detail


@every_section
def test_what_cannot_be_decoded_is_missing(one: Section, cluster_cache: Path) -> None:
    one.keep(CONFIG, key_of(), b"data")
    assert one.look_up(CONFIG, key_of(), lambda data: data[99], "model") is None
    assert found(one, key_of()) == b"data"


@pytest.mark.usefixtures("cluster_cache")
def test_a_section_that_is_off_is_neither_read_nor_written() -> None:
    ENGINES.keep(CONFIG, key_of(), b"data")
    with sections_off(ENGINES, DECISIONS):
        with sections_off(ENGINES):
            assert not ENGINES.is_on(CONFIG)
        assert not ENGINES.is_on(CONFIG) and FACTS.is_on(CONFIG)
        assert found(ENGINES, key_of()) is None
        DECISIONS.keep(CONFIG, key_of(), b"data")
    assert found(ENGINES, key_of()) == b"data" and found(DECISIONS, key_of()) is None


def test_sections_are_off_in_tests_that_do_not_ask_for_them() -> None:
    assert [one.kind for one in ALL if one.is_on(CONFIG)] == [FACTS.kind]


def test_they_are_on_again_after_an_error() -> None:
    before = list(section._off)
    with pytest.raises(ZeroDivisionError), sections_off(FACTS):
        _ = 1 / 0
    assert section._off == before


@pytest.mark.usefixtures("cluster_cache")
def test_without_a_key_nothing_is_kept_or_found() -> None:
    def raises() -> list[str]:
        raise RuntimeError

    for describe in (lambda: None, raises):
        key = make_key("model", describe)
        assert key is None
        ENGINES.keep(CONFIG, key, b"data")
        assert found(ENGINES, key) is None


def test_a_key_covers_the_config_where_it_is_given() -> None:
    other = CONFIG.evolve(max_failures=7)
    assert key_of(config=CONFIG) != key_of(config=other) != key_of(config=None)
    assert key_of(config=CONFIG.evolve(strict=True)) == key_of(config=CONFIG)


def test_a_key_covers_torch_settings() -> None:
    before = key_of()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert key_of() != before
    finally:
        torch.set_float32_matmul_precision(precision)

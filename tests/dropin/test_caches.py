# SPDX-License-Identifier: Apache-2.0
"""Caches of transformers in calls of drop-ins: written in place, shifted, and left alone by trials."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.core.reason import Code
from blade.dropin.nested import NotNested, Parts

transformers = pytest.importorskip("transformers")
cache_utils: Any = pytest.importorskip("transformers.cache_utils")
QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)
LAYERS, HEADS, SIZE = 2, 2, 4


class Attends(nn.Module):
    """Two layers of attention over a cache, and a decision on a value when all has been written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        start = x.abs().sum()
        for place, layer in enumerate(self.inner):
            heads = layer(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
            keys, values = cache.update(heads[1], heads[2], place)
            scores = (heads[0] @ keys.transpose(-1, -2)).softmax(-1)
            x = x + (scores @ values).transpose(1, 2).flatten(2)
        return x * 2 if start > 40 else x - 1


def _text_config(window: int | None = None) -> Any:
    kind = "full_attention" if window is None else "sliding_attention"
    config = SimpleNamespace(sliding_window=window, layer_types=[kind] * LAYERS)
    config.per_layer_config = [config] * LAYERS
    config.get_text_config = lambda decoder: config
    return config


def _static(length: int, filled: int, window: int | None = None) -> Any:
    return _filled(cache_utils.StaticCache(_text_config(window), max_cache_len=length), filled)


def _dynamic(filled: int, window: int | None = None) -> Any:
    return _filled(cache_utils.DynamicCache(config=_text_config(window)), filled)


def _filled(cache: Any, count: int) -> Any:
    for _ in range(count):
        for place in range(LAYERS):
            cache.update(*torch.rand(2, 1, HEADS, 1, SIZE), place)
    return cache


def _state(cache: Any) -> list[Any]:
    names = ("keys", "values", "cumulative_length", "cumulative_length_int", "is_initialized")
    return [getattr(layer, name, None) for layer in cache.layers for name in names]


def _small(length: int = 1) -> torch.Tensor:
    return torch.rand(1, length, HEADS * SIZE) / length / HEADS / SIZE


def _large() -> torch.Tensor:
    return torch.rand(1, 1, HEADS * SIZE) + 9


CACHES: dict[str, Callable[[], Any]] = {
    "static": lambda: _static(9, 3),
    "static, all free": lambda: _static(9, 0),
    "static window": lambda: _static(9, 3, 6),
    "static window, full": lambda: _static(9, 8, 6),
    "dynamic": lambda: _dynamic(3),
    "dynamic window": lambda: _dynamic(3, 6),
    "dynamic window, full": lambda: _dynamic(9, 6),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_as_the_model_leaves_it(name: str) -> None:
    """Whoever answers: an optimized module, or the model after a check that failed behind all writes."""
    model, make = Attends().eval(), CACHES[name]
    sample = {"x": _small(), "cache": make()}
    before = copy.deepcopy(sample["cache"])
    fast = blade.accelerate(model, sample, QUICK)
    _same(sample["cache"], before)  # trials have copies
    cache = make()
    expected = copy.deepcopy(cache)
    held = (
        [t for layer in cache.layers for t in (layer.keys, layer.values)]
        if "static" in name
        else []
    )
    views = [t[..., :2, :] for t in held if t is not None]
    third = 2 if name == "static, all free" else 1  # of another kind by then
    for x, originals in ((_small(), 0), (_large(), 1), (_small(), third)):
        torch.testing.assert_close(fast(x, cache), model(x, expected))
        _same(cache, expected)
        assert blade.stats(fast)["original"]["calls"] == originals
    for tensor, view, layer in zip(held[::2], views[::2], cache.layers):
        assert layer.keys is tensor
        assert torch.equal(view, layer.keys[..., :2, :])


def _same(cache: Any, expected: Any) -> None:
    for found, want in zip(_state(cache), _state(expected), strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(found, want)
        else:
            assert type(found) is type(want) and found == want


def test_caches_that_are_the_models_own() -> None:
    offloaded = _dynamic(1)
    offloaded.offloading = True
    linear = _dynamic(1)
    linear.layers[1] = cache_utils.LinearAttentionLayer()
    apart = _dynamic(8, 6)
    apart.layers[1].cumulative_length += 1
    for cache, why in (
        (offloaded, "a DynamicCache that is offloaded"),
        (linear, "a DynamicCache with a LinearAttentionLayer"),
        (apart, "a DynamicCache whose layers are at different positions"),
        (cache_utils.MtpCache(), "a MtpCache"),
        (cache_utils.EncoderDecoderCache(_dynamic(1), offloaded), "that is offloaded"),
    ):
        with pytest.raises(NotNested, match=why):
            Parts().add(cache)


@torch.no_grad()
def test_a_cache_that_is_not_served_has_a_reason() -> None:
    model = Attends().eval()
    fast = blade.accelerate(model, {"x": _small(), "cache": _dynamic(2)}, QUICK)
    x, cache = _small(), cache_utils.MtpCache()
    expected = copy.deepcopy(cache)
    for _ in range(2):
        torch.testing.assert_close(fast(x, cache), model(x, expected))
    assert blade.stats(fast)["original"]["calls"] == 2
    [reason] = [r for r in blade.report(fast).reasons if r.code == Code.UNKNOWN_TYPE]
    assert "a MtpCache among their arguments are the model's" in reason.detail


@torch.no_grad()
def test_recorded_caches_are_copies_and_files_answer_with_caches(tmp_path: Path) -> None:
    model = Attends().eval()
    cache = _static(9, 0)
    with blade.record(model) as samples:
        for length in (3, 1, 1):
            model(_small(length), cache)
    assert [int(one[1].layers[0].cumulative_length) for one in samples] == [0, 3]
    fast = blade.accelerate(model, samples, QUICK)
    blade.save(fast, tmp_path / "model.blade")
    loaded = blade.load(tmp_path / "model.blade")
    found, expected = _static(12, 0), _static(12, 0)
    for length in (4, 1, 2):
        x = _small(length)
        torch.testing.assert_close(loaded(x, found), model(x, expected))
        _same(found, expected)


class Keeps(nn.Module):
    def forward(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        return (x.tanh() + x)[:, -keep:] * 2 + (1 if isinstance(keep, int) else 0)


@torch.no_grad()
def test_an_int_of_many_values_is_a_number_of_one_kind() -> None:
    model = Keeps().eval()
    fast = blade.accelerate(model, config=QUICK)
    x = torch.rand(2, 9)
    for keep in (1, 2, 3, 4, 5):
        for _ in range(3):
            torch.testing.assert_close(fast(x, keep), model(x, keep))
        assert blade.wait(fast, 120)
    before = blade.stats(fast)["original"]["calls"]
    for keep in (1, 6, 9, 11):
        y = torch.rand(3, 11)
        torch.testing.assert_close(fast(y, keep=keep), model(y, keep))
    assert blade.stats(fast)["original"]["calls"] == before
    assert [name for name in blade.stats(fast) if name.count(" ") == 1] == ["call 1"]
    for keep in (0, True):  # another kind: 0 keeps all
        assert fast(y, keep).shape == model(y, keep).shape
    several = [(x, keep) for keep in (1, 2, 4)]
    at_once = blade.accelerate(model, several, QUICK)
    torch.testing.assert_close(at_once(y, 7), model(y, 7))
    assert blade.stats(at_once)["original"]["calls"] == 0

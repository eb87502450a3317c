# SPDX-License-Identifier: Apache-2.0
"""The check of weights and attributes at each call, in C++ and in Python."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from blade.dropin import unchanged as module
from blade.dropin.watched import Watch

compiled: Any = module._library
WAYS = [
    pytest.param(module.python_weight_facts, module.python_unchanged, id="python"),
    pytest.param(
        compiled and compiled.weight_facts,
        compiled and compiled.unchanged,
        id="compiled",
        marks=pytest.mark.skipif(compiled is None, reason="blade._interrupts was not built"),
    ),
]


@pytest.mark.parametrize(("facts_of", "same"), WAYS)
def test_every_weight_counts(facts_of: Any, same: Any) -> None:
    with torch.inference_mode():
        untracked = torch.ones(3)
    weights = (nn.Parameter(torch.rand(2, 3)), torch.rand(4)[1:], torch.empty(0), untracked)
    facts = facts_of(weights)
    assert same(weights, facts, (), ())
    with torch.no_grad():
        weights[0].add_(1)
    assert not same(weights, facts, (), ())
    facts = facts_of(weights)
    weights[0].data = weights[0].data.clone()
    assert not same(weights, facts, (), ())
    facts = facts_of(weights)
    weights[1].set_(torch.rand(4)[1:])  # type: ignore[call-overload]
    assert not same(weights, facts, (), ())
    a, b = torch.rand(2), torch.rand(2)
    facts = facts_of((a, b))
    a.data, b.data = b.data, a.data  # the same versions, and the same addresses in all
    assert not same((a, b), facts, (), ())


@pytest.mark.parametrize(("facts_of", "same"), WAYS)
@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (2.5, float("2.5"), True),
        (10**9, int("1000000000"), True),
        ("ab", "a".join(["", "b"]), True),
        ([1, "x"], [1, "x"], True),
        (None, 0, False),
        (True, False, False),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 2}, False),
        (2.0, torch.tensor([1.0, 2.0]), False),
        ([2.0], [torch.tensor([1.0, 2.0])], False),
        (torch.float32, torch.float16, False),
    ],
)
def test_every_attribute_counts(
    facts_of: Any, same: Any, before: Any, after: Any, is_same: bool
) -> None:
    held = {"first": 1, "value": before, "last": None}
    items = tuple(x for key, value in held.items() for x in (held, key, value))
    facts = facts_of(())
    assert same((), facts, items, (held, 3))
    held["value"] = after
    assert same((), facts, items, (held, 3)) is is_same
    del held["value"]
    assert not same((), facts, items, ())
    assert not same((), facts, (), (held, 3)) and same((), facts, (), (held, 2))


def test_what_is_no_dict_or_tensor_raises() -> None:
    if compiled is None:
        pytest.skip("blade._interrupts was not built")
    facts = compiled.weight_facts(())
    for wrong in (
        lambda: compiled.weight_facts((1,)),
        lambda: compiled.unchanged((), facts, (1, "a", 2), ()),
        lambda: compiled.unchanged((), facts, (), (1, 2)),
        lambda: compiled.unchanged((torch.ones(1),), facts, (), ()),
    ):
        with pytest.raises((TypeError, ValueError, SystemError)):
            wrong()


def test_a_watch_is_freed_with_its_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.watch = Watch(model)  # type: ignore[assignment]
    assert model.watch.change() is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Settings(SimpleNamespace):
    __module__ = "transformers.generation.configuration_utils"


def test_what_generate_is_told_does_not_change_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    model.generation_config = Settings(num_beams=1)  # type: ignore[assignment]
    model.options = SimpleNamespace(scale=1)  # type: ignore[assignment]
    model._previous_max_cache_length = 8  # type: ignore[assignment]
    watch = Watch(model)
    model.generation_config.num_beams = 2  # type: ignore[union-attr]
    model._previous_max_cache_length = 9  # type: ignore[assignment]
    assert watch.change() is None
    model.options.scale = 2  # type: ignore[union-attr]
    assert watch.change() == "the attribute 'scale' of 'options' changed"
    watch.accept()
    model[1].train()
    assert watch.change() == "the mode of '1' changed"

# SPDX-License-Identifier: Apache-2.0
"""What a call has changed of a module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture.held_state import Changes, HeldState

WEIGHTS = Changes(True, frozenset())


class Part(nn.Module):
    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("largest", torch.tensor(1.0))
        self.table = torch.arange(4)
        self.size = torch.Size([300])
        self.by_size: dict[int, Any] = {1: [torch.ones(1)]}
        self.kept = (torch.zeros(2), {1, 2})


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.count = 1000


def set_count(model: Any, value: Any) -> None:
    model.count = value


CHANGES: dict[str, tuple[Callable[[Any], Any], Changes | None]] = {
    "nothing": (lambda m: None, None),
    "an equal number": (lambda m: set_count(m, int("1000")), None),
    "an equal number of another type": (
        lambda m: set_count(m, 1000.0),
        Changes(False, frozenset({"count"})),
    ),
    "a write to a buffer": (lambda m: m.part.largest.add_(1), WEIGHTS),
    "a write to a parameter": (lambda m: m.part.weight.detach().add_(1), WEIGHTS),
    "another buffer": (lambda m: m.part.register_buffer("largest", torch.ones(())), WEIGHTS),
    "another parameter": (
        lambda m: setattr(m.part, "weight", nn.Parameter(torch.ones(2))),
        WEIGHTS,
    ),
    "a renamed attribute": (
        lambda m: setattr(m, "total", vars(m).pop("count")),
        Changes(False, frozenset({"count", "total"})),
    ),
    "a new attribute": (lambda m: setattr(m, "new", 1), Changes(False, frozenset({"new"}))),
    "a write to a table": (
        lambda m: m.part.table.mul_(2),
        Changes(False, frozenset({"part.table"})),
    ),
    "a write inside of a tuple": (
        lambda m: m.part.kept[0].add_(2),
        Changes(False, frozenset({"part.kept"})),
    ),
    "a set inside of a tuple": (
        lambda m: m.part.kept[1].add(3),
        Changes(False, frozenset({"part.kept"})),
    ),
    "a key": (
        lambda m: m.part.by_size.update({2: []}),
        Changes(False, frozenset({"part.by_size"})),
    ),
    "a list inside of a dict": (
        lambda m: m.part.by_size[1].append(0),
        Changes(False, frozenset({"part.by_size"})),
    ),
    "a write inside of a dict": (
        lambda m: m.part.by_size[1][0].add_(1),
        Changes(False, frozenset({"part.by_size"})),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_seen(what: str) -> None:
    change, want = CHANGES[what]
    model = Whole()
    with torch.no_grad():
        held = HeldState(model)
        change(model)
    assert held.changes() == want


class Counted(tuple[Any, ...]):
    """As e3nn's ``Irreps``, which have no length."""

    def __len__(self) -> int:
        raise NotImplementedError


class Backwards(list[Any]):
    def __iter__(self) -> Any:
        raise NotImplementedError


def test_containers_of_the_users_classes_are_read_as_what_they_extend() -> None:
    model: Any = Whole()
    model.kinds, model.order = Counted(([1], 2)), Backwards([1, 2])
    held = HeldState(model)
    assert held.changes() is None
    model.kinds[0].append(2)
    assert held.changes() == Changes(False, frozenset({"kinds"}))
    held = HeldState(model)
    model.order.append(3)
    assert held.changes() == Changes(False, frozenset({"order"}))


def test_tensors_of_inference_mode_have_no_version() -> None:
    with torch.inference_mode():
        model = Whole()
    assert HeldState(model).changes() is None


def test_what_a_call_leaves_alone_is_not_looked_at_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldState(Whole())
    monkeypatch.setattr("blade.capture.held_state._is_kept", lambda *_: pytest.fail("a look"))
    assert held.changes() is None

# SPDX-License-Identifier: Apache-2.0
"""An original that answers a call and changes by it: what the paths hold is not what it holds any more."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import blade
from blade.errors import BladeWarning

pytestmark = pytest.mark.needs("runtime")
HAS_CHANGED = "changed the state of"


class Largest(nn.Module):
    """Divides by the largest value seen, kept in ``held``."""

    def __init__(self, held: Callable[[nn.Module], None]) -> None:
        super().__init__()
        held(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > self.largest():
            self.note(x.abs().max())
        return x / self.largest()


class InBuffer(Largest):
    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__(lambda own: own.register_buffer("value", torch.tensor(1.0)))

    def largest(self) -> torch.Tensor:
        return self.value

    def note(self, found: torch.Tensor) -> None:
        self.value.copy_(found)


class InNewBuffer(InBuffer):
    def note(self, found: torch.Tensor) -> None:
        self.value = found


class InAttribute(Largest):
    value: float

    def __init__(self) -> None:
        super().__init__(lambda own: setattr(own, "value", 1.0))

    def largest(self) -> float:
        return self.value

    def note(self, found: torch.Tensor) -> None:
        self.value = float(found)


class InDict(Largest):
    values: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__(lambda own: setattr(own, "values", {"largest": torch.tensor(1.0)}))

    def largest(self) -> torch.Tensor:
        return self.values["largest"]

    def note(self, found: torch.Tensor) -> None:
        self.values["largest"] = found


class Table(nn.Module):
    """Keeps a table as long as the longest input, and the size of the last input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)
        self.last = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.shape[0]
        if x.shape[0] > self.table.shape[0]:
            self.table = torch.arange(float(x.shape[0]))
        return x * self.table[: x.shape[0], None]


def optimize(model: nn.Module, x: torch.Tensor, **fields: Any) -> torch.jit.ScriptModule:
    """``model`` with the path of ``x`` alone."""
    config = blade.Config(timing=False, allow_tracing=True, min_cluster_size=1, **fields)
    with patch("blade.capture.capture.explore", lambda own, graph, *_: graph):
        return blade.optimize(model.eval(), x, config)


def answers(module: nn.Module, given: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        for x in given:
            yield module(x).clone()


def small() -> torch.Tensor:
    return torch.linspace(-0.9, 0.8, 8).reshape(2, 4)


@pytest.mark.parametrize("model", [InBuffer, InNewBuffer, InAttribute, InDict])
def test_a_write_that_no_path_makes_is_seen_by_the_next_call(model: type[nn.Module]) -> None:
    made = model()
    optimized = optimize(copy.deepcopy(made), small())
    calls = [small(), small() * 4, small(), small() * 2, small() * 8, small()]
    with pytest.warns(BladeWarning, match=HAS_CHANGED):
        found = list(answers(optimized, calls))
    torch.testing.assert_close(found, list(answers(made, calls)))
    assert blade.stats(optimized)["original"]["calls"] == len(calls) - 1


@pytest.mark.parametrize("model", [InBuffer, InAttribute])
def test_a_path_learned_before_the_write_is_given_up_too(model: type[nn.Module]) -> None:
    made = model()
    optimized = optimize(copy.deepcopy(made), small(), background_paths=True)
    with pytest.warns(BladeWarning, match=HAS_CHANGED):
        found = list(answers(optimized, [small() * 4]))
    assert blade.wait(optimized, 60)
    found += answers(optimized, [small() * 2, small() * 8, small()])
    want = answers(made, [small() * 4, small() * 2, small() * 8, small()])
    torch.testing.assert_close(found, list(want))
    assert "learned" not in blade.stats(optimized)


def test_a_table_that_grows_leaves_the_paths_alone(recwarn: pytest.WarningsRecorder) -> None:
    made = Table()
    optimized = optimize(copy.deepcopy(made), small())
    calls = [torch.ones(9, 4), small(), torch.ones(12, 4), small()]
    recwarn.clear()
    torch.testing.assert_close(list(answers(optimized, calls)), list(answers(made, calls)))
    assert not [w for w in recwarn if HAS_CHANGED in str(w.message)]
    assert blade.stats(optimized)["original"]["calls"] == 2


def test_two_modules_of_one_model_have_a_state_each() -> None:
    model = InBuffer()
    first, second = optimize(model, small()), optimize(model, small())
    with pytest.warns(BladeWarning, match=HAS_CHANGED):
        [raised] = answers(first, [small() * 4])
    assert float(raised.abs().max()) == 1.0
    torch.testing.assert_close(list(answers(second, [small()])), [small()])
    assert float(model.value) == 1.0

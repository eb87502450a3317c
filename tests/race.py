# SPDX-License-Identifier: Apache-2.0
"""A race of backends without clocks: how fast each one is is said by the test.

race = Race({"a": 2.0, "b": 3.0})
monkeypatch.setattr(select, "measure_all", race.measure_each)
optimized, report = optimize(Fake("a"), Fake("b"))
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from fake_backends import Fake, registered
from torch import nn

import blade
from blade.report import ENGINES, Report, Timing

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
CALL_MS = 0.1


class Race:
    """Instead of clocks: how much faster than the original (1 ms an op) each backend is.

    Put together, an engine costs ``call_ms`` besides. ``at`` may give speeds by the rows of the input.
    """

    def __init__(self, speeds: Mapping[str, float], call_ms: Mapping[str, float] | None = None):
        self.speeds, self.call_ms = speeds, call_ms or {}
        self.at: Callable[[str, int], float] | None = None
        self.raced: list[list[tuple[str, int]]] = []
        self.timed: list[tuple[str, int]] = []  # each time a cluster was measured: backend and ops

    def speed(self, backends: str, inputs: Sequence[Any]) -> float:
        """Of several by size, the one that is right here serves."""
        every = backends.split("+")
        rows = inputs[0].shape[0]
        return max(self.speeds[b] if self.at is None else self.at(b, rows) for b in every)

    def measure_each(
        self, modules: Any, original: Any, inputs: Any, rounds: int, early_exit_s: float
    ) -> list[Timing]:
        """Of one cluster."""
        found = []
        for module, own in zip(modules, inputs[1:], strict=True):
            [(engine, ops)] = engines_of(module)
            self.timed.append((engine, ops))
            found.append(Timing(shapes_of(own), ops, ops / self.speed(engine, own), 0.0))
        return found

    def measure_all(
        self, modules: Any, original: Any, inputs: Any, rounds: int, restore: Any = None
    ) -> list[Timing]:
        self.raced = [engines_of(module) for module in modules]
        whole = 10.0  # what is around the clusters included
        saved = [
            sum(
                ops * (1 - 1 / self.speed(e, inputs[0])) - self.call_ms.get(e, CALL_MS)
                for e, ops in engines
            )
            for engines in self.raced
        ]
        return [Timing(shapes_of(inputs[0]), whole, whole - s, 0.0) for s in saved]


def engines_of(module: Any) -> list[tuple[str, int]]:
    """Backends, and number of ops, of each cluster that has an engine."""
    parts = [part for part in module.modules() if hasattr(part, "engine")]
    found = []
    for part in parts:
        held = [getattr(part, name).backend() for name in ENGINES if hasattr(part, name)]
        found.append(("+".join(held), str(part.fallback.graph).count(" = aten::")))
    return found


def shapes_of(inputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in inputs)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))
    return nn.Sequential(*layers).eval()


def optimize(*backends: Fake, inputs: Any = X, **fields: Any) -> tuple[nn.Module, Report]:
    """With these backends alone, without a limit of time, and compared with the original."""
    fields = {"min_cluster_size": 1, "time_budget": None, **fields}
    model = mlp()
    with registered(*backends):
        optimized = blade.optimize(model, inputs, blade.Config(**fields))
        with torch.no_grad():
            for rows in (4, 1, 7):
                x = torch.randn(rows, 16)
                torch.testing.assert_close(optimized(x), model(x))
    return optimized, blade.report(optimized)

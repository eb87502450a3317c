# SPDX-License-Identifier: Apache-2.0
"""The ways into blade, for tests that run through each of them.

run = ENTRANCES[name](model, tensors)
run(*tensors), run.served(), run.reasons(), run.engine_runs()
"""

from collections.abc import Sequence
from typing import Any

import torch
from saved import loaded

import blade

CONFIG = blade.Config(timing=False, min_cluster_size=1)


class Optimized:
    """``blade.optimize``, saved and loaded."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        self._module = loaded(blade.optimize(model, tuple(tensors), CONFIG))
        self._report = blade.report(self._module)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            return self._module(*tensors)

    def served(self) -> int:
        return sum(c.backend == "disc" for c in self._report.clusters)

    def reasons(self) -> list[blade.Reason]:
        return list(self._report.all_reasons())

    def engine_runs(self) -> int:
        return sum(c.get("engine_runs", 0) for c in blade.stats(self._module).values())


class Compiled:
    """``torch.compile(backend="disc")``; compiled at the first call."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        torch._dynamo.reset()
        self._known = set(map(id, _graphs()))
        with CONFIG:
            self._run = torch.compile(model, backend=blade.dynamo.disc, dynamic=True)
            self(*tensors)
        self._graphs = [one for one in _graphs() if id(one) not in self._known]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with torch.no_grad(), CONFIG:
            return self._run(*tensors)

    def served(self) -> int:
        return sum(c.backend == "disc" for one in self._graphs for c in one.report().clusters)

    def reasons(self) -> list[blade.Reason]:
        return [r for one in self._graphs for r in one.report().all_reasons()]

    def engine_runs(self) -> int:
        from blade.dynamo.live_graphs import stats_of

        counts = [c for one in self._graphs for c in stats_of(one).values()]
        return sum(c.get("engine_runs", 0) for c in counts)


def _graphs() -> list[Any]:
    from blade.dynamo.live_graphs import live_graphs

    return live_graphs()


ENTRANCES: dict[str, type[Optimized] | type[Compiled]] = {
    "optimize": Optimized,
    "compile": Compiled,
}

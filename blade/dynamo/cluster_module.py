# SPDX-License-Identifier: Apache-2.0
"""A cluster of a compiled graph: try the engine, else run the original FX subgraph.

The engines of a cluster compete at its first call (``compete``): each is verified and timed against the original.
The fastest serves from then on, and the others are dropped. If every engine is clearly slower than the original,
the original serves; a trial that raises leaves the original. ``Config.optimization_pipeline`` and BLADE_BACKENDS
select the backends, ``Config.time_budget`` limits the time.

A process that runs a saved graph imports this module, and none that compiles, verifies or times.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from blade.dynamo.constant_watch import ConstantWatch
from blade.dynamo.live_graphs import trim_others
from blade.graph.fx.carrier import carrier
from blade.graph.fx.interpreter import OutputsInTurn, without_outputs
from blade.runtime.engine import Engine

if TYPE_CHECKING:
    from blade.config import Config
    from blade.core.cluster import Cluster
    from blade.dynamo.compete import Competition
    from blade.dynamo.engine_cache import StoredEngines
    from blade.timing.stopwatch import Stopwatch
    from blade.timing.time_budget import TimeBudget

log = logging.getLogger(__name__)
Tensors = Sequence[torch.Tensor]


class Cut(Protocol):
    """A cluster and its original; ``FxExtracted``, or what was loaded of one.

    ``cluster`` is ``None`` if its engine was selected before it was saved. ``live``: as in ``Cluster``.
    """

    @property
    def name(self) -> str: ...
    @property
    def fallback(self) -> torch.fx.GraphModule: ...
    @property
    def num_tensors(self) -> int: ...
    @property
    def orders(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def live(self) -> bool: ...
    @property
    def cluster(self) -> "Cluster | None": ...


@dataclass(frozen=True)
class FirstCall:
    """How engines compete. ``derived``: also on derived inputs. ``budget``: of the graph, on the clock ``spent``.

    ``stored``: engines from the cache, and the keys of those that will be kept there.
    """

    config: "Config"
    derived: bool
    budget: "TimeBudget"
    spent: "Stopwatch"
    stored: "StoredEngines | None" = None


class FxClusterModule(torch.nn.Module):
    """Takes the inputs of ``cut`` and returns its outputs, in a list or tuple.

    ``engines``: by backend, in order of preference. ``watched``: those that do not notice writes to their constants.
    ``first_call`` is needed if ``cut`` has a cluster. ``lent``: outputs that the engines keep in their own memory.
    """

    def __init__(
        self,
        cut: Cut,
        engines: Mapping[str, torch.ScriptObject],
        watched: Sequence[str],
        first_call: FirstCall | None,
        lent: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if lent:
            for engine in engines.values():
                cast(Engine, engine).lend(list(lent))
        self.cut = cut
        self.first_call: FirstCall | None = first_call
        self.watched, self.lent = tuple(watched), tuple(lent)
        self.name, self.backends = cut.name, tuple(engines)
        self.fallback = cut.fallback
        self.found: Competition | None = None
        self._rivals = dict(engines)
        self._backend = self.backends[0]
        self._engine: Any = engines[self._backend]
        self._tensors = cut.num_tensors
        self._orders = [
            (k, order, [order.index(axis) for axis in range(len(order))])
            for k, order in cut.orders.items()
        ]
        self._watches: dict[str, ConstantWatch] = _watches(cut, watched)
        self._watch = self._watches.get(self._backend)
        self._unproven: Cluster | None = cut.cluster
        self._first = threading.Lock()
        self._serves = True

    @property
    def serving(self) -> str:
        """The backend that answers, or the original."""
        from blade.report import ORIGINAL

        return self._backend if self._serves else ORIGINAL

    def is_served(self) -> bool | None:
        """Whether an engine serves; ``None`` before the first call."""
        return None if self._unproven is not None else self._serves

    def standing(self) -> tuple[dict[str, torch.ScriptObject], "Cluster | None"]:
        """The engine that serves, by its backend; before the first call, all engines, and the cluster to verify."""
        with self._first:
            if self._unproven is not None:
                return dict(self._rivals), self._unproven
            return ({self._backend: self._engine} if self._serves else {}), None

    def engine(self) -> Engine:
        """The engine that serves; if the original does, or before the first call, the first backend's."""
        return cast(Engine, self._engine)

    def forward(self, *args: Any) -> Tensors:
        if self._unproven is not None:
            self._prove(args)
        if self._serves:
            if self._watch is not None:
                self._watch.check()
            found: Tensors | None = self._engine.try_execute(self._given(args))
            if found is not None:
                return found
        answer: Tensors = self.fallback(*args)
        return answer

    def _given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        count = self._tensors
        given = list(args[:count])
        for k, order, _ in self._orders:
            given[k] = given[k].permute(order)
        if count < len(args):
            given += (carrier(n) if n >= 0 else torch.empty(()) for n in args[count:])
        return given

    def _original(self, *tensors: torch.Tensor) -> Tensors:
        """Run the original on the inputs that the engine takes."""
        answer: Tensors = self.fallback(*self._theirs(tensors))
        return answer

    def _original_in_turn(self, *tensors: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The same, whose outputs come as they are computed."""
        return OutputsInTurn(self.fallback).each(self._theirs(tensors))

    def _original_alone(self) -> Callable[..., object]:
        """The same, without results: in training they take as much memory as an engine's."""
        alone = without_outputs(self.fallback)
        return lambda *tensors: alone(*self._theirs(tensors))

    def _theirs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The inputs of the original, of those that the engine takes."""
        given: list[Any] = list(tensors[: self._tensors])
        for k, _, back in self._orders:
            given[k] = given[k].permute(back)
        return given + [t.numel() for t in tensors[self._tensors :]]

    def _prove(self, args: Sequence[Any]) -> None:
        from blade.core.torch_modes import without_modes
        from blade.dynamo.compete import EngineTrial, compete
        from blade.process.memory import empty_cache

        with self._first:
            cluster = self._unproven
            if cluster is None:
                return
            how = self.first_call
            assert how is not None, self.name
            theirs = [t.detach() for t in self._given(args)]
            on_gpu = any(t.is_cuda for t in theirs)
            if on_gpu:
                trim_others(self.name)
            alone = self._original if how.derived else self._original_alone()
            runs = self._original, self._original_in_turn, alone
            trial = EngineTrial(cluster, self._rivals, self._watches, *runs, how, self.lent)
            # AOTAutograd's mode of the first call and users' own would see, and slow down, every op of the trials
            with how.spent, torch.no_grad(), without_modes():
                found = compete(trial, theirs, self.fallback)
            self._serve(found)
            self._unproven = self.first_call = None  # which holds engines that lost
            if on_gpu:
                empty_cache()  # trials used several times the memory of a call
        for reason in found.reasons:
            log.info("%s: not %s: %s", self.name, reason.backend, reason.detail)

    def _serve(self, found: "Competition") -> None:
        """Keep the engine that won and drop the others: they hold memory, some a copy of the weights."""
        if found.chosen is not None:
            self._backend, self._engine = found.chosen.backend, found.chosen.engine
            self._watch = self._watches.get(self._backend)
        self._serves = found.chosen is not None
        self._rivals, self._watches = {}, {}
        chosen = None if found.chosen is None else found.chosen.released()
        self.found = replace(found, chosen=chosen, tried=tuple(c.released() for c in found.tried))


def item(values: Sequence[Any], index: int) -> Any:
    """A result of a cluster, as a node of the compiled graph."""
    return values[index]


def _watches(cut: Cut, watched: Sequence[str]) -> dict[str, ConstantWatch]:
    """One watch for all engines that do not notice writes to their constants themselves."""
    if not cut.live or not watched:
        return {}
    watch = ConstantWatch(cut.fallback.buffers())
    return dict.fromkeys(watched, watch)

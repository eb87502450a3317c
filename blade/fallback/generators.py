# SPDX-License-Identifier: Apache-2.0
"""Torch's random generators as they were, for a cluster that draws: whoever computes it draws the same numbers.

with Generators(cluster.gm) as generators:      # at the end as at the beginning
    generators.again(); want = original(x)
    generators.again(); got = engine(x)
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.fx import GraphModule, Node


def may_draw(node: Node) -> bool:
    """Whether an op is of those that draw with some arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class Generators:
    """The default generators of the devices that draw in ``gm``; none where nothing does."""

    def __init__(self, gm: GraphModule) -> None:
        self._devices = tuple(dict.fromkeys(_devices(gm)))
        self._states: dict[torch.device, torch.Tensor] = {}

    def __enter__(self) -> "Generators":
        self._states = {device: _state(device) for device in self._devices}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.again()

    def again(self) -> None:
        """Back to the beginning."""
        for device, state in self._states.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, each call of which draws from the beginning."""

        def redrawn(*args: Any) -> Any:
            self.again()
            return function(*args)

        return redrawn if self._states else function


def _devices(gm: GraphModule) -> Iterator[torch.device]:
    for node in gm.graph.nodes:
        if may_draw(node):
            made = node.meta.get("val")
            several = made if isinstance(made, (list, tuple)) else (made,)
            yield from (t.device for t in several if isinstance(t, torch.Tensor))


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

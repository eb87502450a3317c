# SPDX-License-Identifier: Apache-2.0
"""Replay torch's random generators, so that every implementation of a cluster draws the same numbers.

with RngReplay(cluster.gm) as generators:      # restores the state at the end
    generators.reset(); want = original(x)
    generators.reset(); got = engine(x)
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from blade.core.cluster import draws_numbers
from blade.graph.fx.random_ops import may_draw


def draws(gm: GraphModule) -> bool:
    """Whether an op of ``gm`` draws with its arguments."""
    nodes = filter(may_draw, gm.graph.nodes)
    return any(draws_numbers(cast(OpOverload, n.target), n.args, n.kwargs) for n in nodes)


class RngReplay:
    """The default generators of the devices that draw in ``gm``; none if nothing draws."""

    def __init__(self, gm: GraphModule) -> None:
        self._devices = tuple(dict.fromkeys(_devices(gm)))
        self._states: dict[torch.device, torch.Tensor] = {}

    def __enter__(self) -> "RngReplay":
        self._states = {device: _state(device) for device in self._devices}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()

    def reset(self) -> None:
        """Restore the initial state."""
        for device, state in self._states.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that each call draws from the initial state."""

        def redrawn(*args: Any) -> Any:
            self.reset()
            return function(*args)

        return redrawn if self._states else function


def _devices(gm: GraphModule) -> Iterator[torch.device]:
    for node in gm.graph.nodes:
        if may_draw(node) and draws_numbers(node.target, node.args, node.kwargs):
            made = node.meta.get("val")
            several = made if isinstance(made, (list, tuple)) else (made,)
            yield from (t.device for t in several if isinstance(t, torch.Tensor))


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

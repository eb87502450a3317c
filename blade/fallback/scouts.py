# SPDX-License-Identifier: Apache-2.0
"""A first look: each backend at the largest group that it takes. Who is far behind there tries nothing else.

    losers, reasons = find_losers(builts, decisions, backends)     # of takers.scouts, built and measured

The graph is cut anew for each backend, and a cut may have dozens of groups. What is several times slower than
another backend on most of the model does not make up for that on the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blade.backends.base import Backend
from blade.fallback.built import Built
from blade.fallback.measure import speed
from blade.fallback.select import Decision
from blade.reason import Code, Reason, Stage

FAR = 1.5  # times as fast as another backend, whatever the noise: that one tries nothing else

Losers = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Seen:
    """A backend at its group."""

    backend: str
    built: Built
    speed: float
    noise: float


def find_losers(
    builts: Iterable[Built], decisions: Mapping[str, Decision], backends: Sequence[Backend]
) -> tuple[Losers, list[Reason]]:
    """By backend in lower case, the nodes it was measured at; and the reasons.

    Backends that convert in this process stay: that is quick, and they are the first choice elsewhere.
    """
    seen = [
        _Seen(one.backend, built, *speed(one.timings))
        for built in builts
        for one in decisions[built.name].tried
        if one.timings
    ]
    quick = {b.name for b in backends if getattr(b, "in_process", False)}
    losers, reasons = Losers(), []
    for one in seen:
        ahead = [other for other in seen if one.backend not in quick and _is_far(other, one)]
        if ahead:
            best = max(ahead, key=lambda s: s.speed)
            losers[one.backend.lower()] = one.built.group.nodes
            detail = (
                f"on {one.built.name}, the largest group of ops that it takes ({len(one.built.group.nodes)}), it has "
                f"{one.speed:.2f}x the original's speed, {best.backend} has {best.speed:.2f}x on {best.built.name}: "
                "it is not tried on any other."
            )
            reasons.append(
                Reason(Stage.SELECT, Code.NOT_TRIED, one.backend, one.built.name, detail)
            )
    return losers, reasons


def _is_far(ahead: _Seen, behind: _Seen) -> bool:
    """At every sample, if they can be compared one by one, and on most of the same ops."""
    mine, its = set(behind.built.group.nodes), set(ahead.built.group.nodes)
    if len(mine & its) < len(mine) / 2:
        return False
    return ahead.speed * (1 - ahead.noise) > FAR * behind.speed * (1 + behind.noise)

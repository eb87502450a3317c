# SPDX-License-Identifier: Apache-2.0
"""A first look: each backend at the largest group that it takes. Who is far behind there tries nothing else.

    losers, reasons = find_losers(builts, decisions, backends)     # of takers.scouts, built and measured

The graph is cut anew for each backend, and a cut may have dozens of groups. What takes longer for a part of the
ops than another backend for all of them does not make up for that on the rest, nor does what is far behind on
most of the same ops. What fails at its largest group may do better at others; finding out would cost a
conversion each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from blade.backends.base import Backend
from blade.fallback.built import Built
from blade.fallback.measure import speed
from blade.fallback.select import Decision
from blade.reason import Code, Reason, Stage
from blade.report import Timing

AHEAD = 1.1  # times as fast as another backend that has no more to do, and nowhere slower
FAR = 1.5  # the same by speed-ups, where each has some ops that the other one has not
MOST = 0.95  # of the ops of a group: who has as many has all that counts

Losers = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Seen:
    """A backend at its group."""

    backend: str
    built: Built
    timings: tuple[Timing, ...]

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(self.built.group.nodes)

    def says(self) -> str:
        return f"{speed(self.timings)[0]:.2f}x the original's speed on {self.built.name}"


def find_losers(
    builts: Sequence[Built], decisions: Mapping[str, Decision], backends: Sequence[Backend]
) -> tuple[Losers, list[Reason]]:
    """By backend in lower case, the nodes it was tried at; and the reasons.

    Backends that convert in this process stay: that is quick, and they are the first choice elsewhere.
    """
    seen = [
        _Seen(one.backend, built, one.timings)
        for built in builts
        for one in decisions[built.name].tried
        if one.timings
    ]
    slow = {b.name for b in backends if not getattr(b, "in_process", False)}
    losers, reasons = Losers(), []

    def lose(backend: str, built: Built, why: str) -> None:
        losers[backend.lower()] = built.group.nodes
        detail = f"{why}: it is tried at no other group than {built.name} ({len(built.group.nodes)} ops)."
        reasons.append(Reason(Stage.SELECT, Code.NOT_TRIED, backend, built.name, detail))

    for one in seen:
        ahead = [other for other in seen if _is_ahead(other, one)]
        if ahead and one.backend in slow:
            best = max(ahead, key=lambda s: speed(s.timings))
            lose(one.backend, one.built, f"it has {one.says()}, {best.backend} has {best.says()}")
    for built in builts:
        served = any(_wins(other) and _share(built, other) > 0.5 for other in seen)
        for reason in built.reasons if served else ():
            if reason.backend in slow and reason.code in _FAILED:
                lose(reason.backend, built, f"it failed there ({reason.code.value})")
    return losers, reasons


_FAILED = (Code.CONVERSION_FAILED, Code.CONVERSION_CRASHED, Code.WRONG_VALUES, Code.ENGINE_RAISED)


def _wins(seen: _Seen) -> bool:
    mean, noise = speed(seen.timings)
    return mean > 1 + noise


def _share(built: Built, other: _Seen) -> float:
    """How much of the ops of ``built`` the other one has."""
    nodes = frozenset(built.group.nodes)
    return len(nodes & other.nodes) / len(nodes)


def _is_ahead(ahead: _Seen, behind: _Seen) -> bool:
    share = _share(behind.built, ahead)
    mine, its = behind.timings, ahead.timings
    if share >= MOST and len(mine) == len(its):
        ratios = [a.engine_ms / b.engine_ms for a, b in zip(mine, its, strict=True)]
        return min(ratios) > 1 and geometric_mean(ratios) > AHEAD
    (slow, noise), (fast, also) = speed(mine), speed(its)
    return share > 0.5 and fast * (1 - also) > FAR * slow * (1 + noise)

# SPDX-License-Identifier: Apache-2.0
"""Which backends are worth trying: those that may beat DISC at work like this, as far as measurements tell.

    backends, plan, reasons = worth_trying(graph_view, usable, config)      # the reasons against the others

The forecast costs no import of a library: it compares the work of the graph with that of groups of ops at which
the backend was measured beside DISC (nearest neighbours). A backend is left out if it beat DISC at none of the
nearest ones. It is tried where too little is known, where DISC does not take all of the graph, and where a search for
everything is asked for (``Config.search``).
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import OpNode
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.view import GraphView
from blade.partition.support import Support, support
from blade.selection.forecast.records import REFERENCE, SpeedRecord, known_records, machine_of
from blade.selection.forecast.work import Work, kind_of_work, work_of
from blade.selection.plan.compositions import WHOLE

NEAR = 1.0  # distance of work from which on a record says nothing
FEWEST = 3  # records near by without which a backend is tried
NEIGHBOURS = 5  # the most records that are asked
WINS = 0.97  # factor to DISC's time, below which a backend has won
COVERED = 0.95  # share of the nodes that DISC must take


class Forecast(NamedTuple):
    """The backends to try, what they take of the graph, and a ``Reason`` for each one that is left out."""

    backends: tuple[Backend, ...]
    plan: Support
    unlikely: tuple[Reason, ...] = ()


def worth_trying(view: GraphView, backends: Sequence[Backend], config: Config) -> Forecast:
    """Ask the backends that may win for their support, and leave out the others."""

    def supported(asked: Sequence[Backend]) -> Support:
        return support(view.nodes, view.excluded, asked, config, view.loops)

    every = tuple(backends)
    quick = tuple(b for b in every if b.in_process)
    is_asked = config.search == "predicted" and config.timing and len(quick) < len(every)
    if not is_asked or all(b.name != REFERENCE for b in quick):
        return Forecast(every, supported(every))
    plan = supported(quick)
    own = [n for n, label in zip(view.nodes, plan.labels, strict=True) if REFERENCE in label]
    if not own or not _takes_nearly_all(view, own):
        return Forecast(every, supported(every))
    work, machine = work_of(own), machine_of(own)
    learned, shipped = known_records(config, machine)
    unlikely = {
        b.name: Reason(Stage.SELECT, Code.NOT_TRIED, b.name, WHOLE, why)
        for b in every
        if not b.in_process
        and not (set(b.precisions) & _permitted(config))
        and (why := why_unlikely(b.name.lower(), work, learned, shipped)) is not None
    }
    kept = tuple(b for b in every if b.name not in unlikely)
    return Forecast(kept, plan if kept == quick else supported(kept), tuple(unlikely.values()))


def why_unlikely(
    backend: str, work: Work, learned: Sequence[SpeedRecord], shipped: Sequence[SpeedRecord]
) -> str | None:
    """Return a sentence on why ``backend`` will hardly beat DISC at ``work``; ``None`` if it may.

    Records of this machine count before those that come with blade.
    """
    for records, where in ((learned, "on this machine"), (shipped, "on a machine like this")):
        near = _nearest(backend, work, records)
        if len(near) < FEWEST:
            continue
        ratios = [inf if one.ratio is None else one.ratio for one in near]
        if min(ratios) < WINS:
            return None
        return (
            f"it is predicted to lose: at {len(near)} graphs of such ops, measured {where}, "
            f'{_says(ratios)}. Config(search="all") tries it.'
        )
    return None


def _says(ratios: Sequence[float]) -> str:
    finite = sorted(r for r in ratios if r < inf)
    failed = len(ratios) - len(finite)
    parts = []
    if finite:
        span = f"{finite[0]:.2f}x" + (f" to {finite[-1]:.2f}x" if len(finite) > 1 else "")
        parts.append(f"it took {span} of DISC's time")
    if failed:
        parts.append(f"it had no engine that serves at {failed} of them")
    return ", and ".join(parts)


def _nearest(backend: str, work: Work, records: Sequence[SpeedRecord]) -> list[SpeedRecord]:
    mine = ((work.distance(r.work_done()), r) for r in records if r.backend == backend)
    near = sorted(((d, r) for d, r in mine if d < NEAR), key=lambda pair: pair[0])
    return [r for _, r in near[:NEIGHBOURS]]


def _takes_nearly_all(view: GraphView, own: Sequence[OpNode]) -> bool:
    """Whether DISC takes every expensive op, and nearly all of the others."""
    taken = set(map(id, own))
    left = [n for i, n in enumerate(view.nodes) if i not in view.excluded and id(n) not in taken]
    heavy = [n for n in left if kind_of_work(n) != "others"]
    return not heavy and len(own) >= COVERED * (len(own) + len(left))


def _permitted(config: Config) -> set[str]:
    return {name for name in ("fp16", "bf16", "int8", "fp8") if getattr(config, f"enable_{name}")}

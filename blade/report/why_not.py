# SPDX-License-Identifier: Apache-2.0
"""Why no other backend serves: the reasons of a report, summarized as one row per backend.

why_not(report)[0]      # ("onnxruntime", "14 ops, not supported (aten::foo, aten::bar, ...)")
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from math import exp, log

from blade.core.reason import Code, Reason
from blade.report import ORIGINAL, ClusterReport, Report, Timing, Tried

MOST_CLAUSES = 3  # of one backend
MOST_KINDS = 3  # of ops, in a clause
CLAUSE = 170  # characters of a clause that quotes a reason

# The most useful first: limits of the result, backends that nearly served, settings a user can change.
ORDER = (
    *(Code.TRACE_SPECIALIZED, Code.BAKED_ARGUMENT, Code.TOO_NOISY),
    *(Code.SLOWER, Code.NOT_FASTEST, Code.ACCURACY, Code.WRONG_VALUES),
    *(Code.NOT_TRIED, Code.TIME_BUDGET, Code.CALIBRATION),
    *(Code.CONVERSION_CRASHED, Code.CONVERSION_TIMEOUT, Code.CONVERSION_FAILED),
    *(Code.PROBE_CRASHED, Code.UNSUPPORTED_OP, Code.DATA_DEPENDENT, Code.RANDOM, Code.MUTATES),
    *(Code.ALIASES, Code.UNSUPPORTED_DTYPE, Code.UNSUPPORTED_DEVICE, Code.UNKNOWN_TYPE),
    *(Code.TOO_SMALL, Code.BLACK_LISTED, Code.SCRIPT_FAILED, Code.CACHE_UNTRUSTED),
    *(Code.BACKEND_UNAVAILABLE, Code.TRACER_WARNING),
)
_LOST = (Code.SLOWER, Code.NOT_FASTEST)
# Names of several reasons of one code, each about one op.
ABOUT_OPS = {
    Code.UNSUPPORTED_OP: "not supported",
    Code.UNSUPPORTED_DTYPE: "dtype not supported",
    Code.UNSUPPORTED_DEVICE: "device not supported",
    Code.UNKNOWN_TYPE: "type unknown",
    Code.DATA_DEPENDENT: "sizes depend on values",
    Code.RANDOM: "draw random numbers",
    Code.MUTATES: "write to their inputs",
    Code.ALIASES: "share memory with their inputs",
    Code.BLACK_LISTED: "excluded by the config",
    Code.TOO_SMALL: "in groups that are too small",
}


def why_not(shown: Report) -> list[tuple[str, str]]:
    """(backend, why it does not serve more), the most useful first; "blade" has reasons without backend."""
    groups: dict[str, list[Reason]] = {}
    for reason in shown.all_reasons():
        groups.setdefault(reason.backend or "", []).append(reason)
    measured = {name: _against_measured(shown, name) for name in _tried_backends(shown)}
    serving = {name for c in shown.clusters for name in c.backend.split("+")}
    rows = []
    for name in dict.fromkeys([*measured, *groups]):
        clauses = _clauses(groups.get(name, ()), measured.get(name, ""), bool(name))
        if clauses:
            rank, _ = clauses[0]
            texts = [text for _, text in clauses[:MOST_CLAUSES]]
            if more := len(clauses) - len(texts):
                texts.append(f"and {more} more")
            rows.append(((bool(name), name not in serving, rank), name or "blade", texts))
    rows.sort(key=lambda row: row[0])
    return [(name, "; ".join(texts)) for _, name, texts in rows]


def _clauses(reasons: Sequence[Reason], measured: str, is_backend: bool) -> list[tuple[int, str]]:
    """(rank, text) per code, the most useful first."""
    by_code: dict[Code, list[Reason]] = {}
    for reason in dict.fromkeys(reasons):
        by_code.setdefault(reason.code, []).append(reason)
    if measured or not is_backend:  # without backend: reasons against other engine plans
        for code in _LOST:
            by_code.pop(code, None)
    if measured or {*_LOST, Code.WRONG_VALUES, Code.ACCURACY} & by_code.keys():
        by_code.pop(Code.NOT_TRIED, None)  # follows from those at other clusters
    found = [(_rank(code), _clause(code, same)) for code, same in by_code.items()]
    found += [(_rank(Code.SLOWER), measured)] if measured else []
    return sorted(found)


def _clause(code: Code, reasons: Sequence[Reason]) -> str:
    """Several reasons of one code in a few words; a single reason verbatim."""
    n = len(reasons)
    quoted = _quoted(reasons[0])
    if code in ABOUT_OPS and n > 1:
        kinds = Counter(_kind(reason.subject) for reason in reasons)
        named = ", ".join(kind for kind, _ in kinds.most_common(MOST_KINDS))
        return f"{n} ops, {ABOUT_OPS[code]} ({named}{', ...' if len(kinds) > MOST_KINDS else ''})"
    return quoted if n == 1 else f"{n} times {code.value}: {quoted}"


def _quoted(reason: Reason) -> str:
    """The detail, without the standard phrase of ``NOT_TRIED``."""
    detail = reason.detail.partition(": it is tried at no other group")[0].rstrip(".")
    return textwrap.shorten(detail, CLAUSE, placeholder=" ...")


def _kind(subject: str) -> str:
    """``aten::add`` of ``%3 = aten::add``, ``prim::Print`` of ``prim::Print#2``."""
    return subject.rpartition(" = ")[2].partition("#")[0]


def _rank(code: Code) -> int:
    return ORDER.index(code) if code in ORDER else len(ORDER)


def _tried_backends(shown: Report) -> list[str]:
    """Backends with timings at a cluster that another backend serves, the fastest first."""
    speeds: dict[str, list[float]] = {}
    for _, one in losers(shown):
        speeds.setdefault(one.backend, []).append(speed(one.timings))
    return sorted(speeds, key=lambda name: -mean(speeds[name]))


def losers(shown: Report) -> list[tuple[ClusterReport, Tried]]:
    """The backends that were measured at a cluster and do not serve it."""
    return [(c, one) for c in shown.clusters for one in c.tried if one.timings and not one.chosen]


def _against_measured(shown: Report, backend: str) -> str:
    lost = [(c, one) for c, one in losers(shown) if one.backend == backend]
    speeds = [speed(one.timings) for _, one in lost]
    if len(lost) > 1:
        return f"{min(speeds):.2f}x to {max(speeds):.2f}x as fast as TorchScript on {len(lost)} clusters"
    [(c, one)] = lost
    text = f"{speeds[0]:.2f}x as fast as TorchScript on {c.name}"
    if c.backend != ORIGINAL and c.timings:
        return f"{text}, {c.backend} is {speed(c.timings):.2f}x"
    why = _quoted(one.reason) if one.reason is not None else ""
    return why or text


def speed(timings: Sequence[Timing]) -> float:
    """Speed-up over the original, the geometric mean over samples."""
    return mean([t.speedup for t in timings])


def mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return exp(sum(map(log, values)) / len(values))

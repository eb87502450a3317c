# SPDX-License-Identifier: Apache-2.0
"""Who answers inside of what blade made: the share of ops in engines, fallbacks, reasons. Empty for other peers."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu.peers import reasons


def coverage(run: Any) -> dict[str, Any]:
    """Of ``blade.optimize``'s module."""
    if "blade" not in sys.modules:
        return {}
    import blade

    try:
        report = blade.report(run)
    except blade.InputError:
        return {}
    stats = dict(blade.stats(run))
    original = stats.pop("original", {}).get("calls", 0)  # calls that no captured path answers
    return {"served": {**_served([report], list(stats.values())), "original": original}}


def trained_coverage(peer: str) -> dict[str, Any]:
    """Of the graphs, forward and backward, of ``aot_disc``."""
    if peer != "blade":
        return {}
    from blade.dynamo import reports, stats

    return {"served": _served(reports(), stats().values())}


def _served(reports: Sequence[Any], counters: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    inside = total = 0
    for report in reports:
        for cluster in report.clusters:
            count = sum(cluster.ops.values())
            total += count
            inside += count if cluster.backend != "torchscript" else 0
        total += sum(report.outside.values())
    counted = list(counters)
    seconds: dict[str, float] = {}
    for report in reports:
        for stage, took in report.seconds.items():
            seconds[stage] = round(seconds.get(stage, 0.0) + took, 2)
    return {
        "ops": inside,
        "all_ops": total,
        "clusters": sum(len(r.clusters) for r in reports),
        "fallbacks": sum(c.get("fallbacks", 0) for c in counted),
        "seconds": seconds,
        "reasons": reasons(x for r in reports for x in r.all_reasons()),
    }

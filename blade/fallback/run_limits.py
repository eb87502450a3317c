# SPDX-License-Identifier: Apache-2.0
"""Limits of an engine's calls: whether it serves under autocast, and which answers are rechecked.

admit_autocast(engine)                          # before it is verified
recheck(engine, cluster, verdict, config)       # after
"""

from typing import cast

import torch

from blade.config import Config
from blade.core.cluster import Cluster
from blade.graph.fx.random_ops import may_draw
from blade.report import Verdict
from blade.runtime.engine import Engine
from blade.verification.tolerance import narrowest, tolerance_of

# An answer has drifted if its error is this many times the largest one in verification, and larger than
# ``Tolerance.recheck``.
FACTOR = 100.0
_UNIT = 1e-9  # unit of the limit in the engine


def admit_autocast(engine: torch.ScriptObject) -> None:
    """Admit calls under autocast if the graph was traced under it: the trace contains the casts."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        cast(Engine, engine).set_limit("autocast", 1)


def recheck(engine: torch.ScriptObject, cluster: Cluster, verdict: Verdict, config: Config) -> None:
    """Recheck a share ``config.recheck`` of the answers, unless a second run would draw or write."""
    if not config.recheck or cluster.updates or any(map(may_draw, cluster.gm.graph.nodes)):
        return
    least = tolerance_of(narrowest(cluster.gm.graph) or torch.float32).recheck
    known = cast(Engine, engine)
    known.set_limit("recheck_tolerance", round(max(FACTOR * verdict.error, least) / _UNIT))
    known.set_limit("recheck_every", max(1, round(1 / config.recheck)))

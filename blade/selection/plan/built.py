# SPDX-License-Identifier: Apache-2.0
"""Results of building: the candidates of one group of ops, and of one partition of the graph."""

from dataclasses import dataclass

from blade.clustering.problem import Group
from blade.core.reason import Reason
from blade.graph.torchscript.extract import Extracted
from blade.selection.plan.candidate import Candidate


@dataclass(frozen=True)
class ClusterCandidates:
    """Candidates of one group, in the order of trying, and the reasons against the other backends.

    ``extracted`` is ``None`` if the group cannot be expressed for any backend. ``eligible`` are the backends
    that take all of its nodes; the label of ``group`` holds those that were to try it.
    """

    name: str
    group: Group
    extracted: Extracted | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[Reason, ...]
    eligible: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """One partition of the graph: its clusters in program order, and the groups too small for a cluster.

    ``name`` is the backend the partition was made for, or ``JOINT``.
    """

    name: str
    built: tuple[ClusterCandidates, ...]
    reasons: tuple[Reason, ...]

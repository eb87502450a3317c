# SPDX-License-Identifier: Apache-2.0
"""What became of a group of ops, and of one way to cut the graph into groups."""

from dataclasses import dataclass

from blade.clustering.problem import Group
from blade.fallback.candidate import Candidate
from blade.graph.extract import Extracted
from blade.reason import Reason


@dataclass(frozen=True)
class Built:
    """What became of one group: who may serve, in the order of trying, and the reasons of the others.

    ``extracted`` is ``None`` where the group cannot even be expressed for a backend. ``takers`` are the
    backends that take all of its nodes; the label of ``group`` has those that were to try it.
    """

    name: str
    group: Group
    extracted: Extracted | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[Reason, ...]
    takers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """One way to cut the graph: its clusters in program order, and what was too small for one.

    ``name`` is the backend it was made for, or that of the mixture.
    """

    name: str
    built: tuple[Built, ...]
    reasons: tuple[Reason, ...]

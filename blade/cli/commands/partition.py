# SPDX-License-Identifier: Apache-2.0
"""``python -m blade partition MODEL.pt --inputs SAMPLES.pt``: show the clusters and why; build nothing."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from blade.cli.shared.files import read_model, read_samples
from blade.cli.shared.options import (
    Commands,
    add_command,
    add_model,
    parse_config,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import (
    CommandResult,
    add_row,
    plain_table,
    to_text,
)
from blade.config import Config
from blade.core.progress import announce
from blade.core.reason import Reason
from blade.report.graph import NodeReport
from blade.report.text import reason_table

TEXT = """Say which backends would be asked to compile which parts, and why not more. Builds no engine.

Clusters are those of all backends together; one that several backends take would be built by each and
measured. The second table is what each backend would get if it were the only one.
The code in the file runs: give it only files that you trust."""


@dataclass(frozen=True)
class PlannedCluster:
    """A cluster that would be built: its backends and its ops."""

    name: str
    backends: tuple[str, ...]
    ops: dict[str, int]
    first: str
    last: str


@dataclass(frozen=True)
class SoleBackend:
    """The clusters of one backend alone; ``taken`` counts the ops it supports, in clusters or not."""

    backend: str
    taken: int
    clusters: int
    inside: int


@dataclass(frozen=True)
class DryRun:
    """The whole dry run."""

    how: str
    nodes: tuple[NodeReport, ...]
    parts: tuple[PlannedCluster, ...]
    alone: tuple[SoleBackend, ...]
    outside: dict[str, int]
    reasons: tuple[Reason, ...]


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "partition", TEXT)
    add_model(parser)
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    config = parse_config(args.config)
    model = read_model(Path(args.model), allow_pickle=args.allow_pickle, to_eval=args.eval)
    inputs = read_samples(Path(args.inputs), allow_pickle=args.allow_pickle)
    with progress_bar("partition"), torch.no_grad():
        found = partition(model, inputs, config)
    return CommandResult(_data(found), _render(found))


def partition(model: torch.nn.Module, inputs: Any, config: Config) -> DryRun:
    """Run capture, support and clustering as ``optimize`` does; raises the same errors."""
    from blade.capture.capture import capture
    from blade.graph.torchscript.group import cluster_blocks
    from blade.graph.torchscript.listing import kind_of, list_nodes
    from blade.graph.torchscript.view import view
    from blade.partition.support import resolve, support

    backends, against = resolve(config)
    announce("capture")
    captured = capture(model, inputs, config)
    announce("support")
    graph = view(captured)
    plan = support(graph.nodes, graph.excluded, backends, config, graph.loops)
    announce("cluster")

    def grouped(labels: Sequence[frozenset[str]]) -> Any:
        return cluster_blocks(graph, labels, min_size=config.min_cluster_size)

    clustering = grouped(plan.labels)
    members = {f"cluster_{k}": one.nodes for k, one in enumerate(clustering.groups)}
    listed = list_nodes(graph, members)
    parts = []
    for (name, nodes), one in zip(members.items(), clustering.groups, strict=True):
        takers = tuple(b.name for b in backends if b.name.lower() in one.label)
        ops = dict(Counter(kind_of(graph.nodes[n]) for n in nodes))
        parts.append(
            PlannedCluster(name, takers, ops, listed[nodes[0]].source, listed[nodes[-1]].source)
        )
    alone = []
    for backend in backends:
        own = [label & {backend.name.lower()} for label in plan.labels]
        groups = grouped(own).groups
        inside = sum(len(one.nodes) for one in groups)
        alone.append(SoleBackend(backend.name, sum(map(bool, own)), len(groups), inside))
    small = tuple(_too_small(listed, one) for one in clustering.dissolved)
    return DryRun(
        how=captured.how,
        nodes=listed,
        parts=tuple(parts),
        alone=tuple(alone),
        outside=dict(Counter(n.kind for n in listed if n.cluster is None)),
        reasons=(*captured.reasons, *against, *plan.reasons, *small),
    )


def _too_small(nodes: Sequence[NodeReport], dissolved: Any) -> Reason:
    from blade.core.reason import Code, Stage

    who = ", ".join(sorted(dissolved.label))
    subject = ", ".join(nodes[n].name for n in dissolved.nodes[:3])
    return Reason(Stage.CLUSTER, Code.TOO_SMALL, who, subject, dissolved.detail)


def _data(found: DryRun) -> dict[str, Any]:
    return {
        "captured_by": found.how,
        "ops": len(found.nodes),
        "ops_in_clusters": sum(n.cluster is not None for n in found.nodes),
        "clusters": [asdict(part) for part in found.parts],
        "alone": [asdict(one) for one in found.alone],
        "outside": found.outside,
        "nodes": [asdict(node) for node in found.nodes],
        "reasons": json.loads(json.dumps([asdict(reason) for reason in found.reasons])),
    }


def _render(found: DryRun) -> str:
    total = len(found.nodes)
    inside = sum(n.cluster is not None for n in found.nodes)
    head = (
        f"{len(found.parts)} cluster(s) would hold {inside} of {total} ops "
        f"({inside / max(total, 1):.0%}); captured by {found.how}. Nothing was built."
    )
    table = plain_table("cluster", "candidates", "ops", "from", "to", "kinds", right=("ops",))
    for part in found.parts:
        row = (part.name, ", ".join(part.backends), sum(part.ops.values()), part.first, part.last)
        add_row(table, *row, _kinds(part.ops))
    alone = plain_table("backend alone", "takes", "in clusters", "", right=("takes", "in clusters"))
    for one in found.alone:
        rest = f"in {one.clusters} cluster(s)"
        add_row(alone, one.backend, f"{one.taken} of {total}", one.inside, rest)
    outside = f"stays TorchScript: {_kinds(found.outside)}" if found.outside else ""
    tables = [reason_table(found.reasons)] if found.reasons else []
    clusters = [table] if found.parts else []
    return to_text(head, *clusters, alone, *([outside] if outside else []), *tables)


def _kinds(ops: dict[str, int], most: int = 6) -> str:
    ordered = Counter(ops).most_common()
    text = ", ".join(f"{n} {kind.removeprefix('aten::')}" for kind, n in ordered[:most])
    rest = sum(n for _, n in ordered[most:])
    return text + (f", {rest} others" if rest else "")

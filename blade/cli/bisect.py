# SPDX-License-Identifier: Apache-2.0
"""``python -m blade bisect MODEL.pt --inputs SAMPLES.pt``: the first cluster and op whose values differ.

For each backend: every cluster is built and verified by itself, in program order. In the first one
that fails verification, the shortest prefix that fails is searched; its last op is the one. Where all
pass, they are put together, and the shortest row of clusters with which the whole model differs tells.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from blade.cli.files import read_model, read_samples
from blade.cli.options import Commands, add_command, add_model, parse_config
from blade.cli.progress_bar import progress_bar
from blade.cli.result import Exit, Result, to_text
from blade.config import Config
from blade.progress import announce
from blade.reason import Reason

TEXT = """Find the first cluster, and in it the first op, whose values differ beyond what is allowed.

Every engine is built anew (no cache) and verified as `optimize` does it: at the samples, other sizes, other
contents, against fp64. Exit code 1 if anything differs. --config optimization_pipeline=NAME looks at one
backend alone; dump_dir=FOLDER writes a reproducer."""


@dataclass(frozen=True)
class Found:
    """What bisecting one backend came to; ``cluster`` is ``None`` where nothing differs.

    ``op`` and ``source`` are those of the first op that differs, ``None`` if only the whole model does.
    ``not_built`` are the clusters this backend failed to convert: they have no values to compare.
    """

    backend: str
    clusters: int
    cluster: str | None
    op: str | None
    source: str | None
    reason: Reason | None
    not_built: tuple[Reason, ...]


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "bisect", TEXT)
    add_model(parser)
    return parser


def run(args: argparse.Namespace) -> Result:
    config = parse_config(args.config).evolve(cache=False, strict=False)
    model = read_model(Path(args.model), allow_pickle=args.allow_pickle, to_eval=args.eval)
    inputs = read_samples(Path(args.inputs), allow_pickle=args.allow_pickle)
    with progress_bar("bisect"), torch.no_grad():
        found = bisect(model, inputs, config)
    differs = any(one.reason is not None for one in found)
    data = {"differs": differs, "backends": [asdict(one) for one in found]}
    return Result(data, to_text(*map(_tell, found)), Exit.FOUND if differs else Exit.OK)


def bisect(model: torch.nn.Module, inputs: Any, config: Config) -> list[Found]:
    """One ``Found`` per backend that the config asks for and that works here."""
    from blade.capture.torchscript import capture
    from blade.cli.bisecting import Bisecting
    from blade.fallback.support import resolve, support
    from blade.graph.view import view

    backends, _ = resolve(config)
    announce("capture")
    captured = capture(model, inputs, config)
    graph = view(captured)
    plan = support(graph.nodes, graph.pinned, backends, config)
    return [Bisecting(captured, graph, backend, config).find(plan.labels) for backend in backends]


def _tell(one: Found) -> str:
    lines = []
    if one.reason is None:
        lines.append(f"{one.backend}: no difference in {one.clusters} cluster(s)")
    elif one.op is None:
        lines.append(
            f"{one.backend}: each cluster is right by itself; with {one.cluster} in place the model differs"
        )
    else:
        lines.append(f"{one.backend}: {one.cluster} differs, first at {one.op}")
        if one.source:
            lines.append(f"  from {one.source}")
    if one.reason is not None:
        lines.append(f"  {one.reason.code.value}: {one.reason.detail}")
    lines += [f"  not built: {r.subject}: {r.code.value}: {r.detail}" for r in one.not_built]
    return "\n".join(lines)

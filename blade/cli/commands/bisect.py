# SPDX-License-Identifier: Apache-2.0
"""``python -m blade bisect MODEL.pt --inputs SAMPLES.pt``: find the first cluster and op whose values differ.

For each backend, every cluster is built and verified by itself, in program order. In the first cluster that
fails verification, the shortest prefix that fails is searched; its last op is the result. If all pass, they
are assembled, and the last cluster of the shortest sequence with which the whole model differs is the result.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from blade.cli.shared.bisect_result import BisectResult
from blade.cli.shared.files import read_model, read_samples
from blade.cli.shared.options import (
    Commands,
    add_command,
    add_model,
    parse_config,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import CommandResult, ExitCode, to_text
from blade.config import Config
from blade.core.progress import announce

TEXT = """Find the first cluster, and in it the first op, whose values differ beyond what is allowed.

Every engine is built anew (no cache) and verified as `optimize` does it: at the samples, other sizes, other
contents, against fp64. Exit code 1 if anything differs. --config optimization_pipeline=NAME looks at one
backend alone; dump_dir=FOLDER writes a reproducer.
The code in the file runs: give it only files that you trust."""


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "bisect", TEXT)
    add_model(parser)
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    config = parse_config(args.config).evolve(cache=False, strict=False)
    model = read_model(Path(args.model), allow_pickle=args.allow_pickle, to_eval=args.eval)
    inputs = read_samples(Path(args.inputs), allow_pickle=args.allow_pickle)
    with progress_bar("bisect"), torch.no_grad():
        found = bisect(model, inputs, config)
    differs = any(one.reason is not None for one in found)
    data = {"differs": differs, "backends": [asdict(one) for one in found]}
    return CommandResult(
        data, to_text(*map(_tell, found)), ExitCode.FOUND if differs else ExitCode.OK
    )


def bisect(model: torch.nn.Module, inputs: Any, config: Config) -> list[BisectResult]:
    """One ``BisectResult`` per backend that the config asks for and that works here."""
    from blade.capture.capture import capture
    from blade.cli.shared.bisecting import BisectSearch
    from blade.graph.torchscript.view import view
    from blade.partition.support import resolve, support

    backends, _ = resolve(config)
    announce("capture")
    captured = capture(model, inputs, config)
    graph = view(captured)
    plan = support(graph.nodes, graph.excluded, backends, config, graph.loops)
    return [
        BisectSearch(captured, graph, backend, config).find(plan.labels) for backend in backends
    ]


def _tell(one: BisectResult) -> str:
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

# SPDX-License-Identifier: Apache-2.0
"""``python -m blade optimize MODEL.pt --inputs SAMPLES.pt -o OUT.pt``."""

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch

from blade.cli.commands.report import check_page, write_page
from blade.cli.shared.files import (
    check_output,
    read_model,
    read_samples,
    write,
)
from blade.cli.shared.options import (
    Commands,
    add_command,
    add_model,
    parse_config,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import CommandResult
from blade.report import report

TEXT = """Optimize a model for samples of its inputs, and save it.

OUT.pt is TorchScript: `import blade; torch.jit.load("OUT.pt")`. It is written under another name and
renamed, and not over a file that exists unless --force is given.
The code in the file runs: give it only files that you trust."""


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "optimize", TEXT)
    add_model(parser)
    parser.add_argument("-o", "--output", metavar="OUT.pt", required=True, help="file to write")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page, too")
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    out, page = Path(args.output), None if args.html is None else Path(args.html)
    config = parse_config(args.config)
    check_output(out, force=args.force)
    if page is not None:
        check_page(page, force=args.force)
    model = read_model(Path(args.model), allow_pickle=args.allow_pickle, to_eval=args.eval)
    inputs = read_samples(Path(args.inputs), allow_pickle=args.allow_pickle)

    from blade.api import (
        optimize,
    )  # late: imports the compiler, which a wrong file name need not wait for

    start = perf_counter()
    with progress_bar("optimize"):
        optimized = optimize(model, inputs, config)
    seconds = perf_counter() - start
    write(out, lambda path: torch.jit.save(optimized, str(path)), force=args.force)
    made = report(optimized)
    if page is not None:
        write_page(made, page, force=args.force)
    data = {
        "output": str(out),
        "bytes": out.stat().st_size,
        "seconds": seconds,
        "html": args.html,
        "report": json.loads(made.to_json()),
    }
    wrote = f"{out}: {out.stat().st_size / 1e6:.1f} MB, optimized in {seconds:.1f} s"
    return CommandResult(
        data, f"{made}\n\n{wrote}" + (f"\n{page}: the same as a page" if page else "")
    )

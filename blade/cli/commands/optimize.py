# SPDX-License-Identifier: Apache-2.0
"""``python -m blade optimize MODEL.pt --inputs SAMPLES.pt -o OUT.pt``, or ``MODEL.onnx --size batch=8``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from blade.cli.commands.report import check_page, write_page
from blade.cli.shared.files import (
    check_output,
    read_model,
    read_samples,
    write,
)
from blade.cli.shared.options import (
    Commands,
    UsageError,
    add_command,
    add_model,
    parse_config,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import CommandResult
from blade.core import torchscript
from blade.report import report

TEXT = """Optimize a model for samples of its inputs, and save it.

The model is TorchScript, ONNX, or a SavedModel or Keras file of TensorFlow. For ONNX and TensorFlow --inputs may be
left out: random samples are made of the sizes that the model declares, and of --size.
OUT.pt is TorchScript: `import blade; torch.jit.load("OUT.pt")`. It is written under another name and
renamed, and not over a file that exists unless --force is given.
The code in the file runs: give it only files that you trust."""

FOREIGN = (".onnx", ".keras", ".h5", ".hdf5")
"""Suffixes of models that are imported."""


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "optimize", TEXT)
    add_model(parser, needs_inputs=False)
    parser.add_argument(
        "--size",
        metavar="NAME=SIZE",
        nargs="+",
        action="extend",
        default=[],
        help="without --inputs: the size of a dimension that has a name in an ONNX model",
    )
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
    model, inputs = _model_and_inputs(args)

    from blade.api import (
        optimize,
    )  # late: imports the compiler, which a wrong file name need not wait for

    start = perf_counter()
    with progress_bar("optimize"):
        optimized = optimize(model, inputs, config)
    seconds = perf_counter() - start
    write(out, lambda path: torchscript.save(optimized, path), force=args.force)
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


def _model_and_inputs(args: argparse.Namespace) -> tuple[Any, Any]:
    path = Path(args.model)
    is_foreign = path.suffix in FOREIGN or (path / "saved_model.pb").exists()
    if args.size and (args.inputs or not is_foreign):
        raise UsageError("--size: it goes with an ONNX or TensorFlow model, in place of --inputs")
    if args.inputs is None and not is_foreign:
        raise UsageError("--inputs: this model needs samples; give --inputs SAMPLES.pt")
    inputs = None
    if args.inputs is not None:
        inputs = read_samples(Path(args.inputs), allow_pickle=args.allow_pickle)
    if not is_foreign:
        return read_model(path, allow_pickle=args.allow_pickle, to_eval=args.eval), inputs
    if inputs is None:
        from blade.importers.entrance import import_foreign  # late: imports onnx

        inputs = import_foreign(path, None, _sizes(args.size)).inputs
    return path, inputs


def _sizes(entries: Sequence[str]) -> dict[str, int]:
    found = {}
    for entry in entries:
        name, equals, size = entry.partition("=")
        if not equals or not size.isdigit():
            raise UsageError(f"--size {entry}: NAME=SIZE is expected, for example batch=8")
        found[name] = int(size)
    return found

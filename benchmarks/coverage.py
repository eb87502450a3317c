# SPDX-License-Identifier: Apache-2.0
"""How much of each model runs in engines, how exactly, and what stayed out.

    python benchmarks/coverage.py --models bert,resnet50 --shapes 30
    python benchmarks/coverage.py --json coverage.jsonl --markdown coverage.md
    python benchmarks/coverage.py --device cuda --dtype float16 --at-once 4

Each model is optimized and then called at random shapes in a process of its own, so that a crash or a
hang is a row of the table. Nothing is timed against the original: every engine that gives the right
values serves. Columns: clusters (with engine / all); ops in engines, in percent of all; the engines'
instructions by kind: generated kernels, native GEMMs, convolutions and attention, calls of ATen; the
largest error over the shapes, relative to the largest value of the output, against eager and, at the
first shapes, that of blade and of eager against fp64; calls that an engine left to the original;
seconds of a cold optimize.
"""

import argparse
import copy
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu.device import Where, placed
from models import MODELS
from rich.console import Console
from rich.table import Table
from zoo.compare import error
from zoo.model import Model

FUSED = ("loop", "row", "stitch", "copy")  # what the kernels of fusion groups are called
CHANNELS_LAST = ("resnet50", "mobilenet_v2", "mobilenet_v3", "efficientnet", "convnext", "unet")
SHOWN, LONGEST = 5, 400  # reasons per model, characters of each
EARLY = ("capture", "support")  # stages whose reasons come after those of engines
QUIET = ("tracer_warning", "script_failed")  # codes that come last among them


@dataclass
class Row:
    """One model. ``instructions`` by kind, ``calls`` the ATen ops among them; errors are relative."""

    model: str
    clusters: int = 0
    engines: int = 0
    ops: int = 0
    ops_in_engines: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    shapes: int = 0
    error: float | None = None
    error_fp64: float | None = None
    eager_error_fp64: float | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    optimize_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    failed: str = ""

    @property
    def coverage(self) -> float:
        return self.ops_in_engines / max(1, self.ops)


def main() -> None:
    args = _arguments()
    console = Console(width=180)
    rows: list[Row] = []
    with ThreadPoolExecutor(args.at_once) as threads:
        made = [threads.submit(_in_child, name, args) for name in args.models]
        for one in as_completed(made):
            rows.append(one.result())
            _tell(rows, args, console)
    console.print(table(rows))


def _tell(rows: list[Row], args: argparse.Namespace, console: Console) -> None:
    console.print(rows[-1].model, style="dim")
    console.print(_summary(rows[-1]), markup=False)
    if args.json:
        with args.json.open("w") as out:
            out.writelines(
                json.dumps(asdict(row) | {"coverage": row.coverage}) + "\n" for row in rows
            )
    if args.markdown:
        args.markdown.write_text(markdown(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=_names, default=list(MODELS))
    parser.add_argument("--shapes", type=int, default=30, help="random shapes per model")
    parser.add_argument("--exact", type=int, default=6, help="of them, compared with fp64")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of weights and inputs")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="models")
    parser.add_argument("--timeout", type=int, default=900, help="seconds per model")
    parser.add_argument("--dump", type=Path, help="folder for intermediate representations")
    parser.add_argument("--json", type=Path, help="write one line per model here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(MODELS)}")
    return names


def _in_child(name: str, args: argparse.Namespace) -> Row:
    context = mp.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_serve, args=(child, name, args), daemon=True)
    process.start()
    child.close()
    row = Row(name)
    try:
        while pipe.poll(args.timeout):
            row = pipe.recv()  # a row per stage: what was known before a crash stays
            if row.shapes or row.failed:
                break
        else:
            row.failed = f"hangs: no answer in {args.timeout} s"
    except EOFError:
        process.join(10)
        row.failed = f"process died, exit code {process.exitcode}"
    process.kill()
    process.join()
    return row


def _serve(pipe: Connection, name: str, args: argparse.Namespace) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ["BLADE_CACHE_DIR"] = tempfile.mkdtemp(prefix="blade")  # cold
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    row = Row(name)
    try:
        with torch.no_grad():
            examine(row, args, pipe)
    except Exception as error:  # the model's or blade's: a row of the table
        traceback.print_exc()
        row.failed = f"{type(error).__name__}: {str(error)[:300]}"
    pipe.send(row)


def examine(row: Row, args: argparse.Namespace, pipe: Connection) -> None:
    """Optimize at the model's first fixed shape, then compare at random ones."""
    import blade

    where = Where(args.device, args.dtype, args.device != "cpu" and row.model in CHANNELS_LAST)
    model = placed(MODELS[row.model](), where)
    dump = args.dump and args.dump / row.model
    start = time.perf_counter()
    config = blade.Config(timing=False, dump_dir=dump, dynamic_shapes=model.declared or None)
    optimized = blade.optimize(model.module, model.inputs(model.fixed[0], 0), config)
    row.optimize_s = time.perf_counter() - start
    _describe(row, optimized)
    pipe.send(row)
    _compare(row, model, optimized, args)


def _describe(row: Row, optimized: Any) -> None:
    import blade

    report = blade.report(optimized)
    served = [c for c in report.clusters if c.backend != "torchscript"]
    row.clusters, row.engines = len(report.clusters), len(served)
    row.ops_in_engines = sum(sum(c.ops.values()) for c in served)
    outside = Counter(report.outside)
    for cluster in report.clusters:
        if cluster not in served:
            outside.update(cluster.ops)
    row.outside = dict(outside.most_common())
    row.ops = row.ops_in_engines + outside.total()
    programs = [engine.program() for engine in _engines(optimized)]
    row.instructions = dict(instructions(programs))
    row.calls = dict(calls(programs).most_common())
    # what the capture stage tried and gave up is of interest where nothing else is
    told = sorted(report.all_reasons(), key=lambda r: (r.code in QUIET, r.stage.value in EARLY))
    texts = [f"{r.stage.value}/{r.code.value} {r.subject}: {r.detail}"[:LONGEST] for r in told]
    row.reasons = list(dict.fromkeys(texts))[:SHOWN]


def _engines(optimized: torch.nn.Module) -> Iterable[Any]:
    for _, module in optimized.named_modules():
        engine = getattr(module, "engine", None)
        if isinstance(engine, torch.ScriptObject):
            yield engine


def instructions(programs: Sequence[str]) -> Counter[str]:
    """How many instructions are generated kernels ("kernel"), native code ("native"), calls ("call")."""
    kinds: Counter[str] = Counter()
    for words in _instructions(programs):
        fused = words[1].rstrip("0123456789").rstrip("_") in FUSED
        kinds["call" if words[0] == "call" else "kernel" if fused else "native"] += 1
    return kinds


def calls(programs: Sequence[str]) -> Counter[str]:
    """The ATen ops that are called."""
    return Counter(words[1] for words in _instructions(programs) if words[0] == "call")


def _instructions(programs: Sequence[str]) -> Iterable[list[str]]:
    for program in programs:
        lines = program.splitlines()
        at = next(k for k, line in enumerate(lines) if line.startswith("instructions "))
        count = int(lines[at].split()[1])
        yield from (line.split() for line in lines[at + 1 : at + 1 + count])


def _compare(row: Row, model: Model, optimized: Any, args: argparse.Namespace) -> None:
    import blade

    rng = random.Random(args.seed)
    exact = _double(model)
    errors, own, eager = [], [], []
    for k in range(args.shapes):
        inputs = model.random_inputs(rng)
        want, got = model.module(*inputs), optimized(*inputs)
        errors.append(error(got, want))
        if k < args.exact and exact is not None:
            truth = exact(*map(_wide, inputs))
            own.append(error(got, truth))
            eager.append(error(want, truth))
        row.error = max(errors)
        row.error_fp64, row.eager_error_fp64 = max(own, default=None), max(eager, default=None)
    counts: Counter[str] = Counter()
    for one in blade.stats(optimized).values():
        counts.update(one)
    usual = ("calls", "engine_runs", "graph_captures", "graph_replays", "graph_declined")
    row.fallbacks = {k: n for k, n in counts.items() if n and k not in usual}
    row.shapes = args.shapes


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _double(model: Model) -> torch.nn.Module | None:
    """The model in fp64, ``None`` if it insists on fp32 somewhere."""
    module = copy.deepcopy(model.module).double()
    try:
        module(*map(_wide, model.inputs(model.fixed[0], 0)))
    except RuntimeError:
        return None
    return module


COLUMNS = (
    *("model", "clusters", "ops", "coverage", "kernels", "native", "calls"),
    *("error", "fp64: blade", "eager", "fallbacks", "optimize, s"),
)


def _cells(row: Row) -> list[str]:
    def small(value: float | None) -> str:
        return "-" if value is None else f"{value:.0e}"

    return [
        row.model,
        f"{row.engines}/{row.clusters}",
        str(row.ops),
        f"{100 * row.coverage:.1f} %",
        *(str(row.instructions.get(kind, 0)) for kind in ("kernel", "native", "call")),
        *(small(v) for v in (row.error, row.error_fp64, row.eager_error_fp64)),
        "-" if not row.shapes else f"{sum(row.fallbacks.values())}",
        f"{row.optimize_s:.1f}",
    ]


def _summary(row: Row) -> str:
    """Everything about one model, as it becomes known."""
    lines = ["  " + ", ".join(f"{c} {v}" for c, v in zip(COLUMNS[1:], _cells(row)[1:]))]
    if row.failed:
        lines.append(f"  FAILED: {row.failed}")
    lines += [f"  fallback {code}: {count}" for code, count in row.fallbacks.items()]
    lines += [f"  outside: {row.outside}"] if row.outside else []
    lines += [f"  calls: {row.calls}"] if row.calls else []
    return "\n".join([*lines, *(f"  {reason}" for reason in row.reasons)])


def table(rows: Sequence[Row]) -> Table:
    made = Table(title=f"Coverage, torch {torch.__version__}")
    for column in COLUMNS:
        made.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        made.add_row(*_cells(row), style="red" if row.failed else None)
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table, then what failed and the first reasons per model."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    notes = [(row.model, text) for row in rows for text in filter(None, [row.failed, *row.reasons])]
    lines += ["", *(f"* {model}: {text}" for model, text in notes)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

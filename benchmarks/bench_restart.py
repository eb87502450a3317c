# SPDX-License-Identifier: Apache-2.0
"""Starts of one model in fresh processes: cold, again with the cache of the first start, and from a saved file.

    python benchmarks/bench_restart.py --model bert_base --rounds 3
    python benchmarks/bench_restart.py --starts "compile disc,compile inductor" --json restart.json

Each way to start (``WAYS``) gets a folder of its own for all caches. Its first process starts cold, and may save a
file; each round then starts one process per kind of start, in turns. A process reports the seconds of its parts, as
wall and as CPU time: importing torch, importing blade, making the model (transformers included), and "ready": all
from then up to and including the first answer, which is compared with eager's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
PARTS = ("torch", "blade", "model", "ready")

HEAD = """
import json, os, sys, time
marks, cpu = [time.perf_counter()], [time.process_time()]
def mark():
    marks.append(time.perf_counter())
    cpu.append(time.process_time())
import torch
torch.set_num_threads(THREADS)
mark()
if NEEDS_BLADE:
    import blade
    if DYNAMO:
        import blade.dynamo
mark()
from transformers import BertConfig, BertModel
torch.manual_seed(0)

class Encoder(torch.nn.Module):  # torch cannot save functions that return a ModelOutput
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig(**SIZES))

    def forward(self, ids):
        return self.bert(input_ids=ids).last_hidden_state

model, ids = Encoder().eval(), torch.randint(0, 1000, (1, 128))
mark()
with torch.no_grad():
"""
TAIL = """
    mark()
    want = model(ids)
    error = float((answer - want).abs().max())
    assert error < 1e-3, error
seconds = [[b - a for a, b in zip(m, m[1:])] for m in (marks, cpu)]
print(json.dumps({"wall": seconds[0], "cpu": seconds[1], "error": error}))
"""
MODELS: dict[str, dict[str, int]] = {
    "bert_base": {},
    "bert_mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    | {"intermediate_size": 1024},
}


@dataclass(frozen=True)
class Way:
    """Code that sets ``answer``. ``saves`` also writes ``FILE``; ``loads`` starts from it instead."""

    starts: str
    saves: str = ""
    loads: str = ""
    needs_blade: bool = True


def _compiled(backend: str) -> str:
    return f"""
    run = torch.compile(model, fullgraph=True, backend={backend})
    answer = run(ids)
"""


def _saved(backend: str) -> str:
    return f"""
    # by default torch keeps guards of transformers' code that it cannot save
    guards = {{"guard_filter_fn": torch.compiler.keep_portable_guards_unsafe}}
    run = torch.compile(model, fullgraph=True, backend={backend}, options=guards)
    saved = run.forward.aot_compile(((ids,), {{}}))
    saved.save_compiled_function(FILE)
"""


_LOADED = """
    with open(FILE, "rb") as file:
        run = torch.compiler.load_compiled_function(file)
    answer = run(model, ids)
"""


def _optimized(config: str) -> str:
    return f"""
    run = blade.optimize(model, ids, blade.Config({config}))
    answer = run(ids)
"""


_WRITTEN = """
    blade.save(blade.optimize(model, ids), FILE)
"""

_OPENED = """
    run = blade.load(FILE)
    answer = run(ids)
"""

# A row per way to start; what another entrance adds is one more.
WAYS: dict[str, Way] = {
    "optimize": Way(_optimized(""), _WRITTEN, _OPENED),
    "optimize disc": Way(_optimized("optimization_pipeline='disc'")),
    "compile disc": Way(
        _compiled("blade.dynamo.disc"), _saved("blade.dynamo.disc"), _LOADED, needs_blade=True
    ),
    "compile inductor": Way(
        _compiled("'inductor'"), _saved("'inductor'"), _LOADED, needs_blade=False
    ),
    "eager": Way("    answer = model(ids)", needs_blade=False),
}


def main() -> None:
    args = _arguments()
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as top:
        kinds = []
        for name in args.starts:
            way, folder = WAYS[name], Path(top, name.replace(" ", "_"))
            rows[name, "cold"] = [run(args, way, way.starts, folder)]
            kinds.append((name, "again", way.starts, folder))
            if way.saves:
                saving = f"{way.saves}\n{way.starts}"
                run(args, way, saving, folder)
                kinds.append((name, "from a file", way.loads, folder))
        for _ in range(args.rounds):
            for name, kind, code, folder in kinds:
                rows.setdefault((name, kind), []).append(run(args, WAYS[name], code, folder))
    Console(width=140).print(table(args, rows))
    if args.json:
        head = {"command": sys.argv, "threads": args.threads, "model": args.model}
        lines = [{"start": name, "kind": kind, "runs": r} for (name, kind), r in rows.items()]
        args.json.write_text(json.dumps({**head, "rows": lines}) + "\n")


def run(args: argparse.Namespace, way: Way, code: str, folder: Path) -> dict[str, Any]:
    """Seconds per part of one fresh process."""
    folder.mkdir(exist_ok=True)
    names = {
        "THREADS": args.threads,
        "NEEDS_BLADE": way.needs_blade,
        "DYNAMO": "torch.compile" in way.starts,
        "SIZES": MODELS[args.model],
        "FILE": str(folder / "saved"),
    }
    text = "\n".join([*(f"{k} = {v!r}" for k, v in names.items()), HEAD, code, TAIL])
    environment = {
        **os.environ,
        "BLADE_CACHE_DIR": str(folder / "blade"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(args: argparse.Namespace, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> Table:
    title = f"{args.model} 1x128, {args.threads} threads, s (CPU s), medians of {args.rounds}"
    made = Table("start", "kind", *PARTS, "all without torch and model", title=title)
    for (name, kind), runs in rows.items():
        wall, cpu = (
            [statistics.median(r[which][i] for r in runs) for i in range(len(PARTS))]
            for which in ("wall", "cpu")
        )
        cells = [f"{w:.2f} ({c:.2f})" for w, c in zip(wall, cpu, strict=True)]
        ours = f"{wall[1] + wall[3]:.2f} ({cpu[1] + cpu[3]:.2f})"
        made.add_row(name, kind, *cells, ours)
    return made


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="bert_base")
    parser.add_argument("--starts", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3, help="after the cold start")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

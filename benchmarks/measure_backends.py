# SPDX-License-Identifier: Apache-2.0
"""Writes the records that blade forecasts with: how fast other backends are beside DISC, at models of the suite.

    python benchmarks/measure_backends.py --out blade/selection/forecast/measured.jsonl [--models bert,vit]

Each model is optimized in a process of its own with every installed backend and without a time budget (some minutes
each: Inductor compiles C++). What it learned is appended as one line per backend, with the model's name, so that a
run may be resumed: models in the file are skipped. Needs an otherwise idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from suite import libraries
from suite.registry import ENTRIES

HERE = Path(__file__).resolve().parent
LIMIT_S = 900.0  # of one model
PERCEPTRONS = {
    "mlp 8-16-4 x1": (1, 8, 16, 4),
    "mlp 32-64-64-8 x1": (1, 32, 64, 64, 8),
    "mlp 64-256-10 x8": (8, 64, 256, 10),
    "mlp 256-512-16 x64": (64, 256, 512, 16),
    "mlp 512-1024-1024-256 x32": (32, 512, 1024, 1024, 256),
    "mlp 1024-4096-4096-1024 x128": (128, 1024, 4096, 4096, 1024),
}
"""Rows, and sizes of the layers."""


def perceptron(rows: int, *sizes: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval(), (torch.randn(rows, sizes[0]),)


def make(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    if name in PERCEPTRONS:
        return perceptron(*PERCEPTRONS[name])
    model = ENTRIES[name].build("small")
    return model.module, model.inputs(model.fixed[0], 0)


def measure(name: str) -> list[dict[str, Any]]:
    """Optimize ``name`` in this process, whose cache is empty, and return what was learned."""
    import blade
    from blade.selection.forecast.records import known_records, machine_of

    torch.manual_seed(0)
    module, inputs = make(name)
    config = blade.Config(search="all", time_budget=None)
    blade.optimize(module, inputs, config=config)
    learned, _ = known_records(config, machine_of(()))
    rows = [{**asdict(one), "model": name} for one in learned]
    return [{**row, "work": [float(f"{s:.3g}") for s in row["work"]]} for row in rows]


def measured(name: str, packages: Path | None) -> str:
    """The lines of ``name``, from a process of its own; "" where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            *(["--packages", str(packages)] if packages else []),
        ]
        env = {**os.environ, "BLADE_CACHE_DIR": folder, "PYTHONPATH": str(HERE)}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {LIMIT_S:.0f} s", file=sys.stderr)
            return ""
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return ""
    return "".join(
        f"{line}\n" for line in done.stdout.splitlines() if line.startswith('{"backend"')
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join([*PERCEPTRONS, *ENTRIES]))
    parser.add_argument("--packages", type=Path, help="a folder with torchvision, say")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    libraries.look_in(args.packages)
    if args.one:
        print(*map(json.dumps, measure(args.one)), sep="\n")
        return
    if args.out is None:
        parser.error("--out names the file to add to")
    known = (
        {json.loads(line).get("model") for line in args.out.read_text().splitlines()}
        if args.out.exists()
        else set()
    )
    for name in args.models.split(","):
        if name not in known:
            with args.out.open("a") as file:
                file.write(measured(name, args.packages))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Saved files: load and first answer in a fresh process, calls from then on, and sizes.

    python benchmarks/bench_formats.py [--rounds 5] [--json FILE]

A BERT of MiniLM's sizes (6 layers, 384, random weights) is written in every format once; processes then open the
files in turns. ``load_ms`` is without imports, which ``import_ms`` has; ``first_ms`` is the first call after it;
``cpu_ms`` the processor's time of both, which other processes disturb least; ``call_ms`` the median of calls.
``tiny_us``: the median call of a model with one layer of 8, which is overhead.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHAPE = (1, 16)
VOCABULARY = 30522
FORMATS = ("torchscript", "blade .pt", "blade .pt2", "blade aoti", "export", "aoti", "onnxruntime")
CALL_S = 2.0


class Bert(nn.Module):
    """MiniLM's sizes; tensors in, tensors out."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
        self.bert = BertModel(BertConfig(intermediate_size=1536, vocab_size=VOCABULARY, **sizes))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return found


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.inner(ids) * mask).relu()


def bert_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(batch * length).view(batch, length) * 7 % VOCABULARY
    return ids, torch.ones_like(ids)


def tiny_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(batch * 8).view(batch, 8) / 64
    return ids, torch.ones_like(ids)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "bert": (Bert, bert_inputs),
    "tiny": (Tiny, tiny_inputs),
}


def path_of(folder: Path, model: str, name: str) -> Path:
    suffix = {"torchscript": ".pt", "blade .pt": ".pt", "onnxruntime": ".onnx"}.get(name, ".pt2")
    return folder / f"{model}-{name.replace(' ', '')}{suffix}"


def write_all(folder: Path, model: str) -> None:
    """Write ``model`` in every format."""
    import blade

    make, inputs_of = MODELS[model]
    module, sample = make().eval(), inputs_of(2, 12)
    dynamic = torch.export.Dim.DYNAMIC
    axes = {0: dynamic, 1: dynamic} if model == "bert" else {0: dynamic}
    with torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(module, sample, check_trace=False))
        torch.jit.save(traced, path_of(folder, model, "torchscript"))
        config = blade.Config(optimization_pipeline="disc", timing=False, min_cluster_size=1)
        optimized = blade.optimize(module, sample, config)
        blade.save(optimized, path_of(folder, model, "blade .pt"))
        blade.save(optimized, path_of(folder, model, "blade .pt2"))
        blade.save(optimized, path_of(folder, model, "blade aoti"), format="aoti")
        program = torch.export.export(module, sample, dynamic_shapes=(axes, axes))
        torch.export.save(program, path_of(folder, model, "export"))
        package = str(path_of(folder, model, "aoti"))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        path = path_of(folder, model, "onnxruntime")
        torch.onnx.export(module, sample, path, dynamo=True, dynamic_shapes=(axes, axes))


def opened(name: str, path: Path) -> tuple[Callable[..., Any], float, float, float]:
    """What runs the file, the seconds that imports and loading took, and the processor's seconds of the latter."""
    start = time.perf_counter()
    import torch._inductor

    if name.startswith("blade"):
        import blade

        ready, used = time.perf_counter(), time.process_time()
        run = blade.load(path)
    elif name == "onnxruntime":
        import onnxruntime

        ready, used = time.perf_counter(), time.process_time()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def run(*given: torch.Tensor) -> Any:
            found = session.run(None, {k: x.numpy() for k, x in zip(names, given)})
            return torch.from_numpy(found[0])
    else:
        ready, used = time.perf_counter(), time.process_time()
        if name == "export":
            run = torch.export.load(path).module()
        else:
            run = (
                torch._inductor.aoti_load_package(str(path))
                if name == "aoti"
                else torch.jit.load(path)
            )
    return run, ready - start, time.perf_counter() - ready, time.process_time() - used


def measure(folder: Path, model: str, name: str) -> dict[str, Any]:
    """One process's numbers: of a file that it opens first."""
    given = MODELS[model][1](*SHAPE)
    run, imports, load, cpu = opened(name, path_of(folder, model, name))
    with torch.no_grad():
        start, used = time.perf_counter(), time.process_time()
        answer = run(*given)
        first, cpu = time.perf_counter() - start, cpu + time.process_time() - used
        for _ in range(5):
            run(*given)
        seconds = []
        end = time.perf_counter() + CALL_S
        while time.perf_counter() < end:
            start = time.perf_counter()
            run(*given)
            seconds.append(time.perf_counter() - start)
    answer = answer[0] if isinstance(answer, (tuple, list)) else answer
    return {
        "import_ms": imports * 1e3,
        "load_ms": load * 1e3,
        "first_ms": first * 1e3,
        "cpu_ms": cpu * 1e3,
        "call_ms": statistics.median(seconds) * 1e3,
        "sum": float(answer.abs().sum()),
    }


def measure_all(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Every format of every model, one process at a time, in turns."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(rounds):
        for model in MODELS:
            for name in FORMATS[turn % len(FORMATS) :] + FORMATS[: turn % len(FORMATS)]:
                command = [sys.executable, "-W", "ignore", __file__, "--measure", model, name]
                done = subprocess.run(
                    [*command, "--folder", str(folder)], capture_output=True, text=True, check=True
                )
                seen.setdefault((model, name), []).append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for (model, name), found in seen.items():
        row: dict[str, Any] = {"model": model, "format": name}
        row |= {key: statistics.median(one[key] for one in found) for key in found[0]}
        row["file_mb"] = path_of(folder, model, name).stat().st_size / 1e6
        data = path_of(folder, model, name).with_name(
            path_of(folder, model, name).name + ".data"
        )  # of ONNX
        row["file_mb"] += data.stat().st_size / 1e6 if data.exists() else 0
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| file | MB | import ms | load ms | first call ms | CPU ms of load + first | call ms | tiny call us |"
    ]
    lines.append("|---" * 8 + "|")
    tiny = {row["format"]: row["call_ms"] * 1e3 for row in rows if row["model"] == "tiny"}
    for row in sorted((r for r in rows if r["model"] == "bert"), key=lambda r: r["format"]):
        lines.append(
            f"| {row['format']} | {row['file_mb']:.1f} | {row['import_ms']:.0f} | {row['load_ms']:.0f} | "
            f"{row['first_ms']:.0f} | {row['cpu_ms']:.0f} | {row['call_ms']:.2f} | {tiny[row['format']]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "FORMAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, *arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(exist_ok=True)
        for model in MODELS:
            if not path_of(folder, model, "onnxruntime").exists():
                write_all(folder, model)
        rows = measure_all(folder, arguments.rounds)
    for row in rows:
        print(json.dumps(row))
    print(table(rows))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

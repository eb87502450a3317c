# SPDX-License-Identifier: Apache-2.0
"""A long run: calls from many threads, and loads, while memory, open files and threads are watched.

    python benchmarks/soak.py [--calls 1000000] [--threads 8] [--loads 1000] [--phases disc.calls,runner.loads]

Two models, one whose engine is DISC's and one whose engine is a Python function, and two phases of each, in a
process of its own (Linux). ``calls``: threads call a module loaded from a file, one loaded from memory and a deep
copy of each, at sizes from 1 to 89; every answer must equal, bit for bit, the one that a single thread got
before. ``loads``: a file is loaded, from disk and from memory in turns, called, sometimes deep-copied, and dropped.

Prints a table per phase, a line per tenth of it. Exits with 1 if an answer differs or came from the original, if
resident memory grew by more than ``--grown-mib`` in the last third, or if files or threads became more in it.
"""

import argparse
import copy
import gc
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import blade
from blade.runtime.engine import make_engine, register_runner

SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
WIDTH = 32
SAMPLES = 300  # a phase
PHASES = ("disc.calls", "disc.loads", "runner.calls", "runner.loads")
RUNNER = "soak"
PROGRAM = """blade.disc 1
isa
inputs 1
input 0 f32 cpu 2
registers 2
reg 0 dim 0 0
reg 1 dim 0 1
guards 0
slots 1
slot 0 output f32 2 0 1
instructions 0
outputs 1 0
end
"""


@dataclass(frozen=True)
class Sample:
    """Of this process: resident MiB, numbers of open files and of threads."""

    rss: float
    files: int
    threads: int

    @classmethod
    def take(cls) -> "Sample":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        status = Path("/proc/self/status").read_text()
        threads = int(status.split("Threads:")[1].split()[0])
        files = len(os.listdir("/proc/self/fd"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads)


class WithRunner(nn.Module):
    """An engine whose computation is a Python function, and its original."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.engine = make_engine("runner", RUNNER, PROGRAM, b"", [self.weight])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        if outs is None:
            return torch.relu(torch.mm(x, self.weight))
        return outs[0]


def load_runner(
    name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    (weight,) = constants
    return lambda inputs: [torch.relu(torch.mm(inputs[0], weight))]


def make_model(kind: str) -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    if kind == "runner":
        return torch.jit.script(WithRunner().eval())
    layers = (
        nn.Linear(WIDTH, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, WIDTH),
        nn.Softmax(-1),
    )
    config = blade.Config(optimization_pipeline="disc", timing=False)
    return blade.optimize(nn.Sequential(*layers).eval(), torch.randn(4, WIDTH), config)


def inputs() -> dict[int, torch.Tensor]:
    torch.manual_seed(1)
    return {size: torch.randn(size, WIDTH) for size in SIZES}


def check(modules: list[torch.jit.ScriptModule], calls: int) -> None:
    """All calls of these modules, which share no engine, were answered by engines."""
    stats = [one for module in modules for one in engine_stats(module)]
    served = sum(one["engine_runs"] for one in stats)
    assert served == calls and not any(one["fallbacks"] for one in stats), stats


def engine_stats(module: torch.jit.ScriptModule) -> Iterator[dict[str, int]]:
    for part in module.modules():
        if hasattr(part, "engine"):
            yield part.engine.stats()


def soak_calls(path: Path, given: argparse.Namespace) -> Iterator[Sample]:
    """Samples at equal numbers of calls. Raises AssertionError for an answer that differs."""
    loaded = torch.jit.load(str(path))
    from_memory = torch.jit.load(io.BytesIO(path.read_bytes()))
    modules = [loaded, from_memory, copy.deepcopy(loaded), copy.deepcopy(from_memory)]
    given_inputs = inputs()
    wanted = {size: loaded(x) for size, x in given_inputs.items()}
    turns, wrong, done = itertools.count(), [], [0] * given.threads

    def work(thread: int) -> None:
        while (turn := next(turns)) < given.calls and not wrong:
            size = SIZES[turn % len(SIZES)]
            got = modules[turn // len(SIZES) % len(modules)](given_inputs[size])
            if not torch.equal(got, wanted[size]):
                wrong.append(f"call {turn}, {size} rows")
            done[thread] += 1

    threads = [threading.Thread(target=work, args=(k,)) for k in range(given.threads)]
    for thread in threads:
        thread.start()
    for k in range(SAMPLES):
        while sum(done) < given.calls * k // SAMPLES and not wrong:
            time.sleep(0.002)
        yield Sample.take()
    for thread in threads:
        thread.join()
    assert not wrong, f"an answer differs: {wrong[0]}"
    check(modules, given.calls + len(SIZES))


def soak_loads(path: Path, given: argparse.Namespace) -> Iterator[Sample]:
    """Samples at equal numbers of loads. Raises AssertionError for an answer that differs."""
    data, x = path.read_bytes(), inputs()[8]
    gc.collect()
    gc.freeze()  # torch's own objects: a collection has only ours to look at
    wanted = torch.jit.load(str(path))(x)
    for k in range(given.loads):
        module = torch.jit.load(str(path) if k % 2 else io.BytesIO(data))
        used = [module, copy.deepcopy(module)] if k % 10 == 0 else [module]
        assert all(torch.equal(one(x), wanted) for one in used), f"an answer differs: load {k}"
        check(used, len(used))
        del module, used
        if k * SAMPLES // given.loads != (k + 1) * SAMPLES // given.loads:
            gc.collect()
            yield Sample.take()


def grown(samples: list[Sample], limit: float) -> list[str]:
    """What is not flat in the last third; medians of ten samples stand for its start and its end."""
    third = samples[2 * len(samples) // 3 :]
    some = min(10, len(third) // 2)
    start, end = third[:some], third[-some:]
    rss = statistics.median(s.rss for s in end) - statistics.median(s.rss for s in start)
    said = [f"{rss:+.1f} MiB resident, {limit} are allowed"] if rss > limit else []
    for name in ("files", "threads"):
        more = min(getattr(s, name) for s in end) - max(getattr(s, name) for s in start)
        said += [f"{more:+d} {name}"] if more > 0 else []
    return said


def show(phase: str, samples: list[Sample]) -> None:
    print(
        f"{phase:13} {'resident MiB: first':>20} {'median':>8} {'last':>8} {'files':>6} {'threads':>8}"
    )
    for tenth in range(10):
        part = samples[tenth * len(samples) // 10 : (tenth + 1) * len(samples) // 10]
        rss = [s.rss for s in part]
        line = f"{rss[0]:20.1f} {statistics.median(rss):8.1f} {rss[-1]:8.1f}"
        files, threads = max(s.files for s in part), max(s.threads for s in part)
        print(f"{(tenth + 1) * 10:12d}% {line} {files:6d} {threads:8d}")


def run_phase(phase: str, given: argparse.Namespace) -> int:
    register_runner(RUNNER, load_runner)
    kind, what = phase.split(".")
    soak = {"calls": soak_calls, "loads": soak_loads}[what]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.pt"
        make_model(kind).save(str(path))
        gc.collect()
        try:
            samples, said = list(soak(path, given)), []
        except AssertionError as error:
            samples, said = [], [str(error)]
    if samples:
        show(phase, samples)
        said = grown(samples, given.grown_mib)
    line = {"phase": phase, "calls" if what == "calls" else "loads": getattr(given, what)}
    line |= {"threads": given.threads} if what == "calls" else {}
    line |= {"seconds": round(time.perf_counter() - start, 1), "failed": said}
    print(json.dumps({**line, "torch": torch.__version__}), flush=True)
    return 1 if said else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--grown-mib", type=float, default=2.0)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        return run_phase(given.phase, given)
    # A call's own threads: those that call are many, and a product split otherwise has other last bits.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    codes = [
        subprocess.run([sys.executable, *sys.argv, "--phase", phase], env=alone).returncode
        for phase in given.phases.split(",")
    ]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())

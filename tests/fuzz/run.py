# SPDX-License-Identifier: Apache-2.0
"""Builds the fuzz target with ASAN and UBSAN, runs mutants and says what they found: ``make fuzz``.

    python tests/fuzz/run.py --mutants 100000 --seed 1 [--first 0] [--jobs 1] [--folder build/fuzz]

Mutants run in batches, a process each. One that ends its process is run again alone, and where that passes the
batch is bisected for the mutants that it takes; the report is kept in ``FOLDER/found``. Prints a table of findings
by who failed, and exits with 1 if blade did: its code, native code that it runs, or an engine that outlives all who
held it. What fails inside torch, as its reader of files does on some damaged ones, is listed apart.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "blade/runtime/csrc"
API = ROOT / "blade/include"
BATCH = 2000
FLAGS = [
    *("-O1", "-g1", "-fno-omit-frame-pointer", "-fopenmp", "-std=c++20", "-DNDEBUG"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-D_GLIBCXX_ASSERTIONS"),
]
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
OTHERS = ("libtorch", "libc10", "libgomp", "libmkl", "libasan", "libubsan", "libstdc++", "/libc.so")
KINDS = (
    r"AddressSanitizer: ([\w-]+(?: is out of memory)?)",
    r"runtime error: (.*)",
    r"broken invariant: (.*)",
    r"what\(\):\s+(.*)",
)


@dataclass(frozen=True)
class Finding:
    """``who``: blade, torch, or memory (an allocation that the limit refused)."""

    who: str
    what: str
    frames: tuple[str, ...]
    mutant: str


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def units() -> dict[str, tuple[str, ...]]:
    """The units of setup.py, whose import would build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UNITS":
            return dict(eval(compile(ast.Expression(node.value), "setup.py", "eval"), {}))
    raise LookupError("setup.py has no UNITS")


def compile_unit(name: str, text: str, folder: Path, newest: float) -> Path:
    source, target = folder / f"{name}_unit.cpp", folder / f"{name}.o"
    if target.exists() and target.stat().st_mtime > newest and source.read_text() == text:
        return target
    source.write_text(text)
    system = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    command = [
        "g++",
        *FLAGS,
        f"-I{CSRC}",
        f"-I{API}",
        f"-I{HERE}",
        *system,
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    print("compiling", name, flush=True)
    subprocess.run(command, check=True, stderr=subprocess.PIPE)
    return target


def build(folder: Path, jobs: int) -> Path:
    """The program, linked against the torch of this interpreter."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*CSRC.rglob("*.*"), *HERE.glob("*.*")]
    newest = max(path.stat().st_mtime for path in sources)
    texts = {
        name: "".join(f'#include "{one}.cpp"\n' for one in files) for name, files in units().items()
    }
    own = sorted(HERE.glob("*.cpp"))
    texts["target"] = "".join(f'#include "{path.name}"\n' for path in own)
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda unit: compile_unit(unit[0], unit[1], folder, newest), texts.items())
        objects = [str(path) for path in made]
    program = folder / "fuzz"
    if not program.exists() or program.stat().st_mtime < newest:
        (library,) = cpp_extension.library_paths()
        link = ["-Wl,--no-as-needed", f"-L{library}", f"-Wl,-rpath,{library}"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *FLAGS, *objects, *link, *libraries, "-o", str(program)], check=True)
    return program


def make_seeds(folder: Path) -> Path:
    seeds = folder / "seeds"
    if not (seeds / "calls.inputs").exists():
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(HERE / "seeds.py"), str(seeds)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return seeds


@dataclass(frozen=True)
class Target:
    program: Path
    seeds: Path
    folder: Path
    seed: int

    def run(self, first: int, count: int) -> tuple[dict[str, int] | None, str, str]:
        """Counts, or ``None`` where the process ended; its errors, and "NUMBER SEED ROUTE" of the last mutant."""
        progress = self.folder / f"progress-{first}-{count}"
        words = [str(self.seed), str(first), str(count)]
        done = subprocess.run(
            [str(self.program), str(self.seeds), *words, str(progress)],
            capture_output=True,
            env={**os.environ, **OPTIONS, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        last = progress.read_text().strip() if progress.exists() else ""
        progress.unlink(missing_ok=True)
        errors = done.stderr.decode(errors="replace")
        if done.returncode == 0:
            return json.loads(done.stdout), errors, last
        if done.returncode == -14:
            errors += "\nbroken invariant: a mutant takes longer than its time"
        return None, errors, last

    def smallest(self, first: int, last: int) -> int:
        """From where on the mutants up to ``last`` have to run for it to fail."""
        while first < last:
            middle = (first + last + 1) // 2
            if self.run(middle, last - middle + 1)[0] is None:
                first = middle
            else:
                last_needed = middle - 1
                if self.run(last_needed, last - last_needed + 1)[0] is None:
                    return last_needed
                return first
        return first


def frames_of(errors: str) -> list[str]:
    found = re.findall(r"^ *#\d+ 0x[0-9a-f]+ +(?:in )?(.*)$", errors, re.MULTILINE)
    return [re.sub(r"\s+", " ", frame) for frame in found]


def explain(errors: str, mutant: str) -> Finding:
    """The innermost frame that is no allocator's or the C library's says who failed."""
    found = (re.search(kind, errors) for kind in KINDS)
    what = next((match.group(1).strip() for match in found if match), "a signal without report")
    frames = frames_of(errors)
    if "out of memory" in what or "bad_alloc" in what:
        who = "memory"
    else:
        place = next((f for f in frames if not re.search(r"libasan|libsanitizer|/libc\.so", f)), "")
        who = "torch" if any(name in place for name in OTHERS) else "blade"
    return Finding(who, what, tuple(frames[:6]), mutant)


def run_batch(target: Target, first: int, count: int) -> Tally:
    tally, end = Tally(), first + count
    while first < end:
        counts, errors, last = target.run(first, end - first)
        if counts is not None:
            tally.counts.update(counts)
            break
        number = int(last.split()[0]) if last else first
        alone, own, _ = target.run(number, 1)
        if alone is not None:
            start = target.smallest(first, number)
            last += f" (after those from {start} on)"
        else:
            errors = own
        tally.findings.append(explain(errors, last))
        found = target.folder / "found"
        found.mkdir(exist_ok=True)
        (found / f"{target.seed}-{number}.txt").write_text(f"{last}\n{errors}")
        first = number + 1
    return tally


def batches(first: int, mutants: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + mutants, BATCH):
        yield start, min(BATCH, first + mutants - start)


def show(tally: Tally) -> None:
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for one in tally.findings:
        what = re.sub(r"0x[0-9a-f]+|-?\d+", "N", one.what)  # addresses and sizes differ
        alike.setdefault((one.who, what, *one.frames[:3]), []).append(one)
    for found in sorted(alike.values(), key=lambda found: (found[0].who, -len(found))):
        print(f"{found[0].who}: {len(found)} x {found[0].what}; first mutant {found[0].mutant}")
        for frame in found[0].frames:
            print("    ", frame[:170])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/fuzz")
    given = parser.parse_args()
    folder = given.folder.resolve()
    target = Target(build(folder, given.jobs), make_seeds(folder), folder, given.seed)
    start, total = time.perf_counter(), Tally()
    with ThreadPoolExecutor(given.jobs) as pool:
        for tally in pool.map(
            lambda one: run_batch(target, *one), batches(given.first, given.mutants)
        ):
            total.counts.update(tally.counts)
            total.findings += tally.findings
    show(total)
    leaked = sum(n for name, n in total.counts.items() if name.startswith("leaked"))
    who = Counter(one.who for one in total.findings)
    line = {"mutants": given.mutants, "seed": given.seed, "torch": torch.__version__}
    line |= {"seconds": round(time.perf_counter() - start), "findings": dict(who), "leaked": leaked}
    print(json.dumps({**line, "counts": dict(sorted(total.counts.items()))}))
    return 1 if who["blade"] or leaked else 0


if __name__ == "__main__":
    sys.exit(main())

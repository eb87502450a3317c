# SPDX-License-Identifier: Apache-2.0
"""Packages of AOTInductor: in another Python process, and in C++ without Python."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_elsewhere import (
    OPEN_ALL,
    QUICK,
    optimized_case,
    optimized_in_parts,
    with_engine,
    write_calls,
)
from saved_models import CASES, Glued
from torch import nn

import blade
from blade.errors import InputError
from blade.runtime.engine import _library_path

pytestmark = pytest.mark.needs("g++")

CPP = Path(__file__).with_name("open_package.cpp")


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_process_answers_as_the_model(
    name: str, elsewhere: Callable[..., str], tmp_path: Path
) -> None:
    case, module = optimized_case(name)
    archive = tmp_path / f"{name}.pt2"
    blade.save(module, archive, format="aoti")
    write_calls(case.model, case.calls, archive)
    [stats] = json.loads(elsewhere(OPEN_ALL.format(str(tmp_path))))[name]  # and no error
    counts = [one for key, one in stats.items() if key.startswith("cluster")]
    assert sum(one["engine_runs"] for one in counts) > 0
    assert sum(one["fallbacks"] for one in counts) == 0


class _Calls(nn.Module):
    """Tensors for C++."""

    def __init__(
        self, inputs: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]
    ) -> None:
        super().__init__()
        self.inputs = torch.jit.Attribute(inputs, list[list[torch.Tensor]])
        self.expected = torch.jit.Attribute(expected, list[list[torch.Tensor]])


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Path], str]:
    """Open a package in a C++ program, compiled against the libtorch of the installed torch."""
    made = tmp_path_factory.mktemp("cpp") / "open_package"
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-Wl,--no-as-needed"]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    command = ["g++", "-std=c++20", "-O0", *includes, str(CPP), "-o", str(made), *libraries]
    subprocess.run(command, check=True, timeout=300)

    def run(package: Path, calls: Path) -> str:
        done = subprocess.run(
            [str(made), str(_library_path()), str(package), str(calls)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        )
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        return done.stdout

    return run


class Scaled(nn.Module):
    """The engine wants as many factors as rows; one factor is the original's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x) * factor
        return y, y.sum(0)


@pytest.mark.parametrize("is_other_cpu", [False, True])
def test_cpp_without_python(
    in_cpp: Callable[[Path, Path], str], tmp_path: Path, is_other_cpu: bool
) -> None:
    model = Scaled().eval()
    module = blade.optimize(model, (torch.randn(4, 24), torch.randn(4, 8)), QUICK)
    if is_other_cpu:
        with_engine(
            module, lambda _, program: ("disc", program.replace("isa", "isa warp_drive", 1))
        )
    blade.save(module, tmp_path / "m.pt2", format="aoti")
    calls = [[torch.randn(n, 24), torch.randn(k, 8)] for n, k in ((3, 3), (1, 1), (9, 9), (5, 1))]
    script: Any = torch.jit.script(_Calls(calls, [list(model(*call)) for call in calls]))
    torch.jit.save(script, tmp_path / "calls.pt")
    said = in_cpp(tmp_path / "m.pt2", tmp_path / "calls.pt")
    errors = [float(one) for one in re.findall(r"error (\S+)", said)]
    assert len(errors) == len(calls) and max(errors) < 1e-5
    counts = dict(re.findall(r"cluster_0 (\w+) (\d+)", said))
    assert int(counts["calls"]) == 4
    if is_other_cpu:
        assert int(counts["cpu_mismatch"]) == int(counts["fallbacks"]) == 4
    else:
        assert (int(counts["engine_runs"]), int(counts["guard_shape"])) == (3, 1)


def test_the_ops_between_clusters_are_compiled(tmp_path: Path) -> None:
    model, archive = Glued().eval(), tmp_path / "m.pt2"
    module = optimized_in_parts(model)
    blade.save(module, archive, format="aoti", compile_glue=True)
    loaded = blade.load(archive)
    for batch, length in ((3, 5), (1, 1), (7, 9)):
        x, y = torch.randn(batch, length, 16), torch.randn(batch, length, 32)
        expected, written = model(x, clone := y.clone()), clone
        torch.testing.assert_close(loaded(x, y), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y, written)
    stats = blade.stats(loaded)
    assert len(stats) > 1 and all(one["engine_runs"] == 3 for one in stats.values())
    with pytest.raises(RuntimeError, match=r"x.shape\[0\] == y.shape\[0\]"):
        loaded(torch.randn(3, 5, 16), torch.randn(1, 5, 32))


def test_what_has_paths_is_not_taken_apart(tmp_path: Path) -> None:
    _, module = optimized_case("paths")
    with pytest.raises(InputError, match=r"several paths.* without compile_glue"):
        blade.save(module, tmp_path / "m.pt2", format="aoti", compile_glue=True)

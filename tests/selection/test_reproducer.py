# SPDX-License-Identifier: Apache-2.0
"""Every failure leaves a folder whose script shows it again, in another process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake, registered
from torch import nn

import blade
from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def optimize_with(folder: Path, **faults: Any) -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Softmax(-1)).eval()
    with registered(Fake(**faults)):
        config = blade.Config(
            optimization_pipeline="fake", timing=False, min_cluster_size=1, dump_dir=folder
        )
        return blade.optimize(model, X, config)


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "reproduce.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("faults", "code", "says"),
    [
        ({"convert": fakes.aborts_converting}, Code.CONVERSION_CRASHED, "SIGABRT"),
        ({"run": fakes.wrong_values}, Code.WRONG_VALUES, "output 0 is 1.0e-03 from an fp64 run"),
    ],
)
def test_the_script_shows_the_failure(
    faults: dict[str, Any], code: Code, says: str, tmp_path: Path
) -> None:
    optimized = optimize_with(tmp_path, spoils=["aten::gelu"], in_process=False, **faults)
    assert blade.report(optimized).outside == {"aten::gelu": 1}
    # one folder, of the smallest part that fails: the prefix that ends with the culprit
    [folder] = (tmp_path / "failures").iterdir()
    assert folder.name == f"cluster_0__2_fake_{code.value}"
    assert "torch.ops.aten.gelu.default" in (folder / "graph.py").read_text()
    assert torch.__version__ in (folder / "versions.json").read_text()
    inputs = torch.load(folder / "inputs.pt")
    assert torch.equal(inputs["samples"][0][0], X)
    ran = run_script(folder)
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.startswith(f"{code.value}: ")
    assert says in ran.stdout


def test_the_script_says_when_all_is_well_again(tmp_path: Path) -> None:
    optimize_with(tmp_path, spoils=["aten::gelu"], convert=fakes.fails_to_convert)
    [folder] = (tmp_path / "failures").iterdir()
    (folder / "backend.pickle").write_bytes(pickle.dumps(Fake()))
    ran = run_script(folder)
    assert (ran.returncode, ran.stdout) == (
        0,
        "No failure here: the engine converts and is right.\n",
    )


def test_a_failure_that_the_next_backend_makes_good_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blade.backends import registry

    monkeypatch.delenv("BLADE_BACKENDS")
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    first, second = Fake("first", convert=fakes.fails_to_convert), Fake("second")
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Softmax(-1)).eval()
    with registered(first, second):
        blade.optimize(model, X, blade.Config(timing=False, dump_dir=tmp_path))
    names = [path.name for path in (tmp_path / "failures").iterdir()]
    assert names == ["cluster_0_first_conversion_failed"]


def test_nothing_is_written_without_dump_dir_or_failure(tmp_path: Path) -> None:
    optimize_with(tmp_path)
    assert not (tmp_path / "failures").exists()


def test_what_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failures").write_text("in the way")
    optimized = optimize_with(tmp_path, run=fakes.wrong_values)
    assert Code.WRONG_VALUES in {r.code for r in blade.report(optimized).all_reasons()}
    assert "no reproducer of" in caplog.text

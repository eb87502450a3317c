# SPDX-License-Identifier: Apache-2.0
"""What a stranger has: a wheel built from the source distribution, installed where nothing of this tree is seen."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
# what setup.py and MANIFEST.in read; nothing that was built here
SOURCES = (
    *("blade", "examples", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"),
)
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")

_OPTIMIZE = """
import sys
import torch
import blade

assert blade.__file__.startswith(sys.argv[1]), blade.__file__
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()
x = torch.randn(3, 16)
optimized = blade.optimize(model, (x,), blade.Config(timing=False))
torch.testing.assert_close(optimized(x), model(x))
page = blade.report(optimized).to_html()
assert "<html" in page and len(page) > 10_000
torch.jit.save(optimized, "model.pt")
torch.save((torch.ones(5, 16), model(torch.ones(5, 16)).detach()), "sample.pt")
"""
_LOAD = """
import torch
import blade

x, y = torch.load("sample.pt")
model = torch.jit.load("model.pt")
torch.testing.assert_close(model(x), y)
assert blade.stats(model)["cluster_0"]["engine_runs"] == 1, blade.stats(model)
"""


def _cmake() -> str:
    folders = (str(Path(sys.executable).parent), os.environ["PATH"])
    found = shutil.which("cmake", path=os.pathsep.join(folders))
    assert found is not None
    return found


def _python(arguments: Sequence[str], folder: Path, path: str = "") -> str:
    """What Python prints that is run in ``folder`` and sees, besides what is installed, what is in ``path``."""
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs("runtime", "torch_mlir", "g++", "cmake")
def test_a_wheel_of_the_source_distribution_works_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for name in ("pip", "wheel", "ninja"):
        pytest.importorskip(name)
    source, built, installed = (tmp_path / name for name in ("source", "built", "installed"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (source, built, elsewhere):
        folder.mkdir()
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)

    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _python(["-c", make, str(built)], source)
    [archive] = built.glob("blade-*.tar.gz")
    with tarfile.open(archive) as contents:
        packed = {name.partition("/")[2] for name in contents.getnames()}
    assert {n for n in SOURCES if (ROOT / n).is_file()} <= packed
    assert not any(name.startswith("tests") for name in packed)  # some without what they import

    offline = ("--no-deps", "--no-index")
    wheel = (*PIP, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(built))
    _python([*wheel, str(archive)], elsewhere)
    [made] = built.glob("blade-*.whl")
    _python([*PIP, "install", *offline, "--target", str(installed), str(made)], elsewhere)
    [metadata] = installed.glob("blade-*.dist-info/METADATA")
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata.read_text().splitlines()
    runtime = installed / "blade" / "libblade_runtime.so"
    entries = subprocess.run(
        ["readelf", "--dynamic", runtime], check=True, capture_output=True, text=True
    )
    [path] = re.findall(r"\(RUNPATH\).*\[(.*)\]", entries.stdout)
    assert path == "$ORIGIN/../torch/lib"  # no folder of this machine
    kept = {path.relative_to(ROOT) for path in (ROOT / "blade").rglob("*.py")}
    assert kept == {path.relative_to(installed) for path in (installed / "blade").rglob("*.py")}

    path = str(installed)
    assert "DISC works here." in _python(["-m", "blade", "doctor"], elsewhere, path)
    assert _python([f"{path}/bin/blade", "--version"], elsewhere, path).startswith("blade ")
    _python(["-c", _OPTIMIZE, path], elsewhere, path)
    _python(["-c", _LOAD], elsewhere, path)
    prefix = _python(
        ["-c", "import blade; print(blade.cmake_prefix_path)"], elsewhere, path
    ).strip()
    assert prefix.startswith(f"{installed}/blade/share/cmake;")
    configure = [
        _cmake(),
        "-S",
        str(source / "examples" / "cpp"),
        "-B",
        str(tmp_path / "configured"),
    ]
    subprocess.run([*configure, f"-DCMAKE_PREFIX_PATH={prefix}"], check=True, capture_output=True)
    example = str(source / "examples" / "02_own_backend.py")
    assert "largest difference" in _python([example], elsewhere, path)

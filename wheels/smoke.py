# SPDX-License-Identifier: Apache-2.0
"""Try a wheel where nothing of this tree is seen: install it, optimize a model, and load it in Python and in C++.

python wheels/smoke.py dist/torch2.13/blade-*.whl            # what it requires comes from this interpreter
python wheels/smoke.py --install dist/torch2.13/blade-*.whl  # what it requires is installed, from the index
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_OPTIMIZE = """
import sys
import torch
import blade

assert blade.__file__.startswith(sys.prefix), blade.__file__
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()
optimized = blade.optimize(model, torch.randn(3, 16), blade.Config(timing=False, min_cluster_size=1))
x = torch.randn(50, 16)
torch.testing.assert_close(optimized(x), model(x))
torch.jit.save(optimized, "model.pt")
torch.save((x,), "inputs.pt")
torch.save(model(x).detach(), "expected.pt")
"""
_LOAD = """
import torch
import blade

model = torch.jit.load("model.pt")
torch.testing.assert_close(model(*torch.load("inputs.pt")), torch.load("expected.pt"))
assert blade.stats(model)["cluster_0"]["engine_runs"] == 1, blade.stats(model)
"""
_COMPARE = """
import torch

torch.testing.assert_close(torch.load("outputs.pt")[0], torch.load("expected.pt"))
"""


def _run(command: Sequence[str | Path], folder: Path) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment(wheel: Path, folder: Path, *, install: bool) -> Path:
    """A virtual environment with the wheel; the rest is installed, or seen in the environment of this interpreter."""
    _run(
        [sys.executable, "-m", "venv", *([] if install else ["--without-pip"]), folder / "venv"],
        folder,
    )
    python = folder / "venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "--quiet",
    ]
    _run([*pip, "install", *([] if install else ["--no-deps", "--no-index"]), wheel], folder)
    if not install:
        [packages] = (folder / "venv").glob("lib/python*/site-packages")
        # a folder that is named here is seen, and the links in it to editable packages are not followed
        (packages / "parent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return python


def _try_cpp(python: Path, folder: Path) -> str:
    cmake = shutil.which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if cmake is None or shutil.which("g++") is None:
        return "not tried in C++: there is no cmake or g++"
    prefix = _run([python, "-c", "import blade; print(blade.cmake_prefix_path)"], folder).strip()
    _run(
        [cmake, "-S", ROOT / "examples" / "cpp", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        folder,
    )
    _run([cmake, "--build", "build"], folder)
    said = _run(["build/run_model", "model.pt", "inputs.pt", "outputs.pt"], folder)
    _run([python, "-c", _COMPARE], folder)
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--install", action="store_true", help="install what the wheel requires")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = _environment(args.wheel.resolve(), folder, install=args.install)
        _run([python, "-c", _OPTIMIZE], folder)
        _run([python, "-c", _LOAD], folder)
        print(f"{args.wheel.name}: optimized, saved and loaded in another process")
        print(_try_cpp(python, folder))


if __name__ == "__main__":
    main()

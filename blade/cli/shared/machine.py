# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine and its software, as the system reports them.

cpu()["features"], gpus()[0]["name"], compilers()["g++"], runtime()["built_with_torch"]

Facts that the system does not report are ``None`` or missing.
"""

import importlib
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import blade
from blade.core.disk_cache import DiskCache, folder, limit_bytes
from blade.core.hardware import cpu_name
from blade.core.private_files import why_not_private

COMPILERS = ("c++", "g++", "clang++")
# register.cpp embeds this mark in the C++ runtime: it can be read even if the library cannot be loaded.
_BUILT_WITH = re.compile(rb"blade-built-with-torch=([\w.+-]+)")


def cpu() -> dict[str, Any]:
    """Name, cores, vector width, features that DISC uses, caches by level in KiB, and memory in GiB."""
    from blade.backends.disc.target.cpu import host

    target = host()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": cpu_name(),
        "machine": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable,
        "quota_cores": _quota(Path("/sys/fs/cgroup/cpu.max")),
        "torch_threads": torch.get_num_threads(),
        "float_lanes": target.lanes,
        "features": list(target.isa),
        "caches_kib": _caches(Path("/sys/devices/system/cpu/cpu0/cache")),
        "memory_gib": _memory_gib(Path("/proc/meminfo")),
    }


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": one.name,
                "compute_capability": f"{one.major}.{one.minor}",
                "memory_gib": round(one.total_memory / 2**30, 1),
            }
        )
    return found


def why_no_gpu() -> str:
    """A sentence that says why ``gpus`` is empty."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for CPUs"
    return "torch sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"


def compilers() -> dict[str, str]:
    """The C++ compilers on the path, with the first line of ``--version``; DISC needs none."""
    found = {name: shutil.which(name) for name in COMPILERS}
    return {name: _first_line(path) for name, path in found.items() if path is not None}


def versions() -> dict[str, str | None]:
    """Versions of blade's dependencies; ``None`` if one is not installed."""
    return {
        "blade": blade.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "torch-mlir": package_version("torch-mlir"),
        "numpy": package_version("numpy"),
        "system": platform.platform(),
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def runtime() -> dict[str, Any]:
    """The C++ library: its path, the torch it was built with, and why it cannot be loaded, if so."""
    from blade.errors import BackendError

    files = sorted(Path(blade.__file__).parent.glob("libblade_runtime*.so"))
    built = _BUILT_WITH.search(files[0].read_bytes()) if files else None
    try:
        importlib.import_module("blade.runtime")  # registers the library, or says why not
    except BackendError as error:
        why: str | None = str(error)
    else:
        why = None
    return {
        "file": str(files[0]) if files else None,
        "built_with_torch": built[1].decode() if built else None,
        "why_not": why,
    }


def cache() -> dict[str, Any]:
    """The folder of compiled results and its current contents."""
    path = folder()
    if path is None:
        return {"folder": None, "entries": 0, "bytes": 0, "limit_bytes": limit_bytes()}
    sizes = [one.bytes for one in DiskCache(path).entries()]
    near = path
    while not near.exists() and near != near.parent:
        near = near.parent
    return {
        "folder": str(path),
        "entries": len(sizes),
        "bytes": sum(sizes),
        "limit_bytes": limit_bytes(),
        "writable": os.access(near, os.W_OK),
        "untrusted": why_not_private(path),
    }


def _caches(place: Path) -> dict[str, int]:
    """Sizes in KiB, "L2": 1024, of the first core's caches, without instruction caches."""
    found: dict[str, int] = {}
    for index in sorted(place.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level, size = (index / "level").read_text().strip(), (index / "size").read_text()
        except OSError:
            continue
        if match := re.fullmatch(r"(\d+)([KM])", size.strip()):
            found[f"L{level}"] = int(match[1]) * (1024 if match[2] == "M" else 1)
    return found


def _quota(path: Path) -> float | None:
    """Number of CPUs that this process's control group may use at a time; ``None``: all."""
    try:
        share, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else round(int(share) / int(period), 2)


def _memory_gib(path: Path) -> float | None:
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return round(int(match[1]) / 2**20, 1) if match else None


def _first_line(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (done.stdout or done.stderr).partition("\n")[0].strip()

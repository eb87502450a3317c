# SPDX-License-Identifier: Apache-2.0
"""MLIR kernels -> an archive of relocatable objects for the host: from the cache, or compiled in parallel.

    data = compile_kernels([("loop_5f3a", text), ...], host(), cache)

A kernel's key in the cache is its text (its name included), how it is compiled, the CPU and torch-mlir's version.
Compiling holds Python's lock, so what runs beside it runs in processes (``llvm.main``), where that pays.
"""

import functools
import importlib.metadata
import io
import logging
import os
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from blade.backends.disc.cpu import llvm
from blade.backends.disc.cpu.archive import archive
from blade.backends.disc.cpu.target import Target
from blade.cache import Cache, digest

log = logging.getLogger(__name__)

Kernels = Sequence[tuple[str, str]]

# What one kernel takes, roughly: per kernel, and per character of its text.
KERNEL_S, CHARACTER_S = 0.015, 1.1e-6
START_S = 0.15  # until a process compiles
MAX_PROCESSES = 8
_NOTHING = (("nothing", "llvm.func @nothing() {\n    llvm.return\n}\n"),)


def why_unavailable() -> str | None:
    """``None`` where kernels can be compiled, else a sentence with the fix."""
    try:
        import torch_mlir.execution_engine  # noqa: F401
    except ImportError as error:
        return f"torch-mlir cannot be imported ({error}); install the package torch-mlir."
    return None


def compile_kernels(kernels: Kernels, target: Target, cache: Cache | None = None) -> bytes:
    """One archive with every kernel of ``(name, MLIR text)``; names must differ.

    Without kernels it holds one function nobody calls. The code is for the host, whose features
    ``target.isa`` lists.
    """
    assert len({name for name, _ in kernels}) == len(kernels), [name for name, _ in kernels]
    kernels = kernels or _NOTHING
    base = [llvm.OPTIONS, compiler(), *target.isa]
    keys = {name: digest([*base, name, text]) for name, text in kernels}
    objects = {name: cache.get("kernel", key) if cache else None for name, key in keys.items()}
    missing = [(name, text) for name, text in kernels if objects[name] is None]
    for name, data in _compile(missing).items():
        objects[name] = data
        if cache is not None:
            cache.put("kernel", keys[name], data)
    return archive({name: data for name, data in objects.items() if data is not None})


@functools.lru_cache(maxsize=1)
def compiler() -> str:
    """The version of the compiler and the very CPU it generates code for; "" without a compiler."""
    if why_unavailable() is not None:
        return ""
    return f"torch-mlir {importlib.metadata.version('torch-mlir')}\n{_cpu()}"


def _cpu() -> str:
    """Family, model and features of the first processor, as the system gives them."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
        moving = (
            "cpu MHz",
            "bogomips",
            "BogoMIPS",
            "processor",
            "apicid",
            "initial apicid",
            "core id",
        )
        return "\n".join(line for line in first.splitlines() if not line.startswith(moving))
    return f"{platform.machine()} {platform.processor()}"


def _compile(kernels: Kernels) -> dict[str, bytes]:
    """The objects by name. This process does the first share, others the rest."""
    mine, *theirs = _shares(kernels)
    started = [(share, _start(share)) for share in theirs]
    try:
        objects = {name: llvm.compile_kernel(name, text) for name, text in mine}
        for share, process in started:
            objects.update(_collect(share, process))
    finally:
        for _, process in started:
            if process is not None:  # ended already, unless something raised
                process.kill()
                process.wait()
    return objects


def _shares(kernels: Kernels) -> list[list[tuple[str, str]]]:
    """Kernels for this process and for each one worth starting: longest first, to who is free first."""
    seconds = {name: KERNEL_S + CHARACTER_S * len(text) for name, text in kernels}
    processors = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(kernels))
    shares: list[list[tuple[str, str]]] = [[]]
    busy = [0.0]
    for name, text in sorted(kernels, key=lambda kernel: -seconds[kernel[0]]):
        first = min(range(len(busy)), key=busy.__getitem__)
        if busy[first] > 2 * START_S and len(busy) < processors:
            first = len(busy)
            shares.append([])
            busy.append(START_S)
        shares[first].append((name, text))
        busy[first] += seconds[name]
    return shares


def _start(kernels: Kernels) -> subprocess.Popen[bytes] | None:
    """A process that compiles ``kernels``; ``None`` where none can be started."""
    # not "-m": that would import blade, and with it torch; not the file: its folder has a math.py
    code = (
        "import importlib.util as u, sys; "
        f"sys.path[:] = {sys.path!r}; s = u.spec_from_file_location('llvm', {llvm.__file__!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.main()"
    )
    try:
        with tempfile.TemporaryFile() as request:  # a pipe would make us wait until it is read
            pickle.dump(list(kernels), request)
            request.seek(0)
            return subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
    except OSError as error:
        log.info("kernels are compiled one after the other: %s", error)
        return None


def _collect(kernels: Kernels, process: subprocess.Popen[bytes] | None) -> dict[str, bytes]:
    """What ``process`` made of ``kernels``; what it did not make is compiled here."""
    objects: list[bytes] = []
    if process is not None:
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        if process.wait() == 0:
            objects = pickle.load(io.BytesIO(output))
        else:
            log.info("a process that compiles kernels ended with %s", process.returncode)
    if len(objects) != len(kernels):
        objects = [llvm.compile_kernel(name, text) for name, text in kernels]
    return {name: data for (name, _), data in zip(kernels, objects, strict=True)}

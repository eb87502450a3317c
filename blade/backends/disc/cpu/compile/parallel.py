# SPDX-License-Identifier: Apache-2.0
"""Compile MLIR kernels in parallel to an archive of relocatable objects for the host, with a cache.

    data = compile_kernels([("loop_5f3a", text), ...], host(), cache)

A kernel's cache key consists of its text (with its name), the compiler's options, the CPU and torch-mlir's
version. Compilation holds Python's GIL, so parallel compilation uses processes (``llvm.serve``), if that
pays.
"""

import functools
import importlib.metadata
import logging
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from blade.backends.disc.cpu.compile import llvm
from blade.backends.disc.cpu.compile.ar_archive import archive
from blade.backends.disc.target.cpu import CpuTarget
from blade.core.disk_cache import DiskCache, digest
from blade.process.child import NoAnswer, SpawnedProcess

log = logging.getLogger(__name__)

Kernels = Sequence[tuple[str, str]]

# Approximate compile time: per kernel, and per character of its text.
KERNEL_S, CHARACTER_S = 0.015, 1.1e-6
START_S = 0.15  # until a process compiles
DEADLINE_S = 600.0  # for a process; later its remaining kernels are compiled here
MAX_PROCESSES = 8
_NOTHING = (("nothing", "llvm.func @nothing() {\n    llvm.return\n}\n"),)


def why_unavailable() -> str | None:
    """``None`` if kernels can be compiled, else a sentence with the fix."""
    try:
        import torch_mlir.execution_engine  # noqa: F401
    except ImportError as error:
        return f"torch-mlir cannot be imported ({error}); install the package torch-mlir."
    return None


def compile_kernels(kernels: Kernels, target: CpuTarget, cache: DiskCache | None = None) -> bytes:
    """One archive with every kernel of ``(name, MLIR text)``; names must differ.

    Without kernels it contains one unused function. The code is for the host, whose features ``target.isa`` lists.
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
    """The compiler's version and the CPU that it generates code for; "" without a compiler."""
    if why_unavailable() is not None:
        return ""
    return f"torch-mlir {importlib.metadata.version('torch-mlir')}\n{_cpu()}"


def _cpu() -> str:
    """Family, model and features of the first processor, as the system reports them."""
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
    """The objects by name. This process compiles the first share, others the rest."""
    mine, *theirs = _shares(kernels)
    with ExitStack() as children:
        started = [(share, _start(share, children)) for share in theirs]
        objects = {name: llvm.compile_kernel(name, text) for name, text in mine}
        for share, child in started:
            objects.update(_collect(share, child))
    return objects


def _shares(kernels: Kernels) -> list[list[tuple[str, str]]]:
    """Shares for this process and for each process worth starting: longest first, to the least loaded."""
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


def _start(kernels: Kernels, children: ExitStack) -> SpawnedProcess | None:
    """A process that compiles ``kernels``; ``None`` where none can be started."""
    try:
        child = children.enter_context(SpawnedProcess(llvm.serve, standalone=True))
        child.post(list(kernels))
    except OSError as error:
        log.info("kernels are compiled one after the other: %s", error)
        return None
    return child


def _collect(kernels: Kernels, child: SpawnedProcess | None) -> dict[str, bytes]:
    """The objects of ``kernels`` from ``child``; missing ones are compiled here."""
    objects: list[bytes] = []
    if child is not None:
        try:
            objects = child.answer(DEADLINE_S)
        except NoAnswer as error:
            log.info("a process that compiles kernels %s: %s", error, error.output)
    if len(objects) != len(kernels):
        objects = [llvm.compile_kernel(name, text) for name, text in kernels]
    return {name: data for (name, _), data in zip(kernels, objects, strict=True)}

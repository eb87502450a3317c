# SPDX-License-Identifier: Apache-2.0
"""Compile Triton text to cubins in a separate program (``serve_compilations``); this needs no GPU.

This file imports nothing of blade or torch. The program imports Triton once, before the first request. Its
forks compile, so that they have Triton from the start, and a crash of one does not affect the others.
"""

import importlib.util
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_NUMBER = 4  # bytes of an index, which a pipe passes on whole
_AT_ONCE = 4096  # number of indices that a pipe holds


def compile_unit(unit: Any, arch: int, folder: str) -> Any:
    """Triton's compiled kernel (``asm``, ``metadata``) of a ``TritonUnit``; ``folder`` receives its text."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": unit.warps, "num_stages": unit.stages}
    if "device_assert" in unit.text:  # asserts need debug mode; integers may still wrap
        options |= {"debug": True, "sanitize_overflow": False}
    if unit.registers:
        options["maxnreg"] = unit.registers
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source(unit, folder), target=target, options=options)


def source(unit: Any, folder: str) -> Any:
    """Triton's source object of ``unit``."""
    from triton.compiler import ASTSource

    path = os.path.join(folder, f"{unit.name}.py")
    with open(
        path, "w", encoding="utf-8"
    ) as file:  # Triton reads a function's source from its file
        file.write(unit.text)
    spec = importlib.util.spec_from_file_location(unit.name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, unit.name)
    constants = dict(unit.constants)
    signature = dict(unit.signature) | dict.fromkeys(constants, "constexpr")
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]] for name in unit.aligned
    }
    return ASTSource(function, signature, constants, attributes)


def pack(compiled: Any) -> tuple[bytes, int, int]:
    """The cubin, the threads of a block and the bytes of shared memory that a launch needs."""
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size + getattr(metadata, "profile_scratch_size", 0)
    assert not scratch, f"{metadata.name} wants {scratch} bytes of scratch"
    return compiled.asm["cubin"], 32 * metadata.num_warps, metadata.shared


def serve_compilations(requests: Any, arch: int) -> None:
    """Answer requests (``blade.process.frames.Requests``): fields of units, folder for files, number of processes.

    The answer lists for each unit the result of ``pack``, or the error as text.
    """
    _prepare(arch)
    for fields, folder, processes in requests:
        _keep_in(os.path.join(folder, "cache"))
        units = [SimpleNamespace(**one) for one in fields]
        requests.answer(_in_forks(units, arch, Path(folder), processes))


def _prepare(arch: int) -> None:
    """Import and look up everything that the first compilation of a process needs."""
    import triton.compiler.code_generator
    import triton.language.extra.cuda.libdevice  # noqa: F401
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime import cache

    # The key of Triton's own cache, which is discarded here: to compute it, each process would read all files of
    # Triton, hundreds of MB.
    cache.triton_key = lambda: "the same"
    knobs.compilation.store_binary_only = True
    make_backend(GPUTarget("cuda", arch, 32)).hash()  # asks ptxas for its version


def _keep_in(folder: str) -> None:
    """Set the folder of Triton's own cache."""
    from triton import knobs

    knobs.cache.dir = folder


def _in_forks(units: Sequence[Any], arch: int, folder: Path, processes: int) -> list[Any]:
    """Compile in forks; each takes the next unit, in order, when it is done with one."""
    left = list(range(len(units)))
    while left:
        now, left = left[:_AT_ONCE], left[_AT_ONCE:]
        numbers, into = os.pipe()
        os.write(into, b"".join(k.to_bytes(_NUMBER, "little") for k in now))
        os.close(into)
        workers = []
        for _ in range(min(processes, len(now))):
            if (worker := os.fork()) == 0:
                _work(units, arch, folder, numbers)
                os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        rest = os.read(numbers, _AT_ONCE * _NUMBER)
        os.close(numbers)
        untaken = [rest[i : i + _NUMBER] for i in range(0, len(rest), _NUMBER)]
        if len(untaken) < len(now):  # units that crashed forks have left untaken
            left = [*(int.from_bytes(k, "little") for k in untaken), *left]
    return [_result(folder, k) for k in range(len(units))]


def _work(units: Sequence[Any], arch: int, folder: Path, numbers: int) -> None:
    """Compile units until none is left. An exception ends the process, with its text in the unit's file."""
    while number := os.read(numbers, _NUMBER):
        k = int.from_bytes(number, "little")
        with open(folder / f"{k}.errors", "wb") as errors:
            os.dup2(errors.fileno(), 2)
        found = pack(compile_unit(units[k], arch, str(folder)))
        part = folder / f"{k}.part"
        part.write_bytes(pickle.dumps(found))
        part.rename(folder / f"{k}.done")


def _result(folder: Path, k: int) -> Any:
    done, errors = folder / f"{k}.done", folder / f"{k}.errors"
    if done.exists():
        return pickle.loads(done.read_bytes())
    words = errors.read_text(errors="replace").strip() if errors.exists() else ""
    return words or "the process that compiled it ended"

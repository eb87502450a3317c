# SPDX-License-Identifier: Apache-2.0
"""Compile Triton text to cubins, or to code objects of AMD's, in a separate program (``serve_compilations``).

No GPU is needed. A target is the arguments of Triton's ``GPUTarget``: ("cuda", 90, 32), ("hip", "gfx942", 64).

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
Target = tuple[str, Any, int]
# What is named differently for AMD.
_AMD = (("extra.cuda import libdevice", "extra.hip import libdevice"), (".rint(", ".nearbyint("))


def compile_unit(unit: Any, target: Target, folder: str, shared: int | None = None) -> Any:
    """Triton's compiled kernel (``asm``, ``metadata``) of a ``TritonUnit``; ``folder`` receives its text.

    ``shared``: bytes of shared memory of a block. Loads are pipelined in fewer stages where it would take more,
    which changes no launch; raises ``ValueError`` if one stage does not fit either.
    """
    for stages in range(unit.stages, 0, -1):
        compiled = _compiled(unit, target, folder, stages)
        if shared is None or compiled.metadata.shared <= shared:
            return compiled
    needed = compiled.metadata.shared
    raise ValueError(f"{unit.name} needs {needed} bytes of shared memory, a block has {shared}")


def _compiled(unit: Any, target: Target, folder: str, stages: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": unit.warps, "num_stages": stages}
    if "device_assert" in unit.text:  # asserts need debug mode; integers may still wrap
        options |= {"debug": True, "sanitize_overflow": False}
    if unit.registers:
        options["maxnreg"] = unit.registers
    found = source(unit, folder, target[0] == "hip")
    return triton.compile(found, target=GPUTarget(*target), options=options)


def source(unit: Any, folder: str, is_amd: bool = False) -> Any:
    """Triton's source object of ``unit``."""
    from triton.compiler import ASTSource

    path = os.path.join(folder, f"{unit.name}.py")
    text = unit.text
    for ours, theirs in _AMD if is_amd else ():
        text = text.replace(ours, theirs)
    with open(
        path, "w", encoding="utf-8"
    ) as file:  # Triton reads a function's source from its file
        file.write(text)
    spec = importlib.util.spec_from_file_location(unit.name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, unit.name)
    constants = dict(unit.constants)
    if is_amd and "PRECISION" in constants:  # AMD's products have no TF32
        constants["PRECISION"] = "ieee"
    signature = dict(unit.signature) | dict.fromkeys(constants, "constexpr")
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]] for name in unit.aligned
    }
    return ASTSource(function, signature, constants, attributes)


def pack(compiled: Any) -> tuple[bytes, int, int]:
    """The cubin, the threads of a block and the bytes of shared memory that a launch needs."""
    metadata = compiled.metadata
    sizes = ("global_scratch_size", "profile_scratch_size")
    scratch = sum(getattr(metadata, size, 0) for size in sizes)
    assert not scratch, f"{metadata.name} wants {scratch} bytes of scratch"
    code = compiled.asm["hsaco" if metadata.target.backend == "hip" else "cubin"]
    return code, metadata.target.warp_size * metadata.num_warps, metadata.shared


def serve_compilations(requests: Any, first: Target) -> None:
    """Answer requests (``blade.process.frames.Requests``): fields of units, their target, its bytes of shared
    memory, folder for files, number of processes. ``first``: the target that is expected.

    The answer lists for each unit the result of ``pack``, or the error as text.
    """
    _prepare(first)
    prepared = {first}
    for fields, target, shared, folder, processes in requests:
        if target not in prepared:
            _prepare(target)
            prepared.add(target)
        _keep_in(os.path.join(folder, "cache"))
        units = [SimpleNamespace(**one) for one in fields]
        requests.answer(_in_forks(units, target, shared, Path(folder), processes))


def _prepare(target: Target) -> None:
    """Import and look up everything that the first compilation for ``target`` needs."""
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
    make_backend(GPUTarget(*target)).hash()  # asks ptxas for its version


def _keep_in(folder: str) -> None:
    """Set the folder of Triton's own cache."""
    from triton import knobs

    knobs.cache.dir = folder


def _in_forks(
    units: Sequence[Any], target: Target, shared: int, folder: Path, processes: int
) -> list[Any]:
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
                _work(units, target, shared, folder, numbers)
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


def _work(units: Sequence[Any], target: Target, shared: int, folder: Path, numbers: int) -> None:
    """Compile units until none is left. An exception ends the process, with its text in the unit's file."""
    while number := os.read(numbers, _NUMBER):
        k = int.from_bytes(number, "little")
        with open(folder / f"{k}.errors", "wb") as errors:
            os.dup2(errors.fileno(), 2)
        found = pack(compile_unit(units[k], target, str(folder), shared))
        part = folder / f"{k}.part"
        part.write_bytes(pickle.dumps(found))
        part.rename(folder / f"{k}.done")


def _result(folder: Path, k: int) -> Any:
    done, errors = folder / f"{k}.done", folder / f"{k}.errors"
    if done.exists():
        return pickle.loads(done.read_bytes())
    words = errors.read_text(errors="replace").strip() if errors.exists() else ""
    return words or "the process that compiled it ended"

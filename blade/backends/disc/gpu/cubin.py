# SPDX-License-Identifier: Apache-2.0
"""Triton text -> cubin, as a program of its own (``serve``): Triton needs no GPU to compile.

Nothing of blade or torch is imported here. The program imports Triton once, before anybody asks for anything;
what compiles are its forks, so that they have it from the start, and one that crashes takes no other along.
"""

import importlib.util
import os
import pickle
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_NUMBER = 4  # bytes, which a pipe hands on whole
_AT_ONCE = 4096  # of them it holds


def compile_unit(unit: Any, arch: int, folder: str) -> Any:
    """Triton's compiled kernel (``asm``, ``metadata``) of a ``Unit``; ``folder`` takes its text."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": unit.warps, "num_stages": unit.stages}
    if "device_assert" in unit.text:  # which is nothing without; integers may go on to wrap
        options |= {"debug": True, "sanitize_overflow": False}
    if unit.registers:
        options["maxnreg"] = unit.registers
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source(unit, folder), target=target, options=options)


def source(unit: Any, folder: str) -> Any:
    """What Triton compiles."""
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


def serve(arch: int, idle_s: float) -> None:
    """Answer requests on stdin until it is closed, or for ``idle_s`` seconds nothing comes.

    A request is a pickled (fields of units, folder for files, processes); the answer, on stdout, is the pickled list
    of what ``pack`` makes of each, or in its place what went wrong, as text.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
    _prepare(arch)
    while select.select([sys.stdin.buffer], [], [], idle_s)[0]:
        try:
            fields, folder, processes = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _keep_in(os.path.join(folder, "cache"))
        units = [SimpleNamespace(**one) for one in fields]
        pickle.dump(_in_forks(units, arch, Path(folder), processes), answers)
        answers.flush()


def _prepare(arch: int) -> None:
    """All that the first compilation of a process imports and looks up."""
    import triton.compiler.code_generator
    import triton.language.extra.cuda.libdevice  # noqa: F401
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime import cache

    # The key of Triton's own cache, which is thrown away here: to know that it is the same Triton, each process
    # would read all of it, hundreds of MB.
    cache.triton_key = lambda: "the same"
    knobs.compilation.store_binary_only = True
    make_backend(GPUTarget("cuda", arch, 32)).hash()  # asks ptxas for its version


def _keep_in(folder: str) -> None:
    """Where Triton has its own cache."""
    from triton import knobs

    knobs.cache.dir = folder


def _in_forks(units: Sequence[Any], arch: int, folder: Path, processes: int) -> list[Any]:
    """Each process takes the next unit when it is done with one, in the order they have."""
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
        if len(untaken) < len(now):  # who took one and ended leaves others
            left = [*(int.from_bytes(k, "little") for k in untaken), *left]
    return [_result(folder, k) for k in range(len(units))]


def _work(units: Sequence[Any], arch: int, folder: Path, numbers: int) -> None:
    """What a compilation raises ends the process, its words in the unit's own file."""
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

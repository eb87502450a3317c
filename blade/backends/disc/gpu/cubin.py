# SPDX-License-Identifier: Apache-2.0
"""Triton text -> cubin, as a program of its own (``main``): Triton needs no GPU to compile.

Nothing of blade or torch is imported here: a process that only compiles starts in a fifth of a second.
"""

import importlib.util
import os
import pickle
import sys
from types import SimpleNamespace
from typing import Any


def compile_unit(unit: Any, arch: int, folder: str) -> Any:
    """Triton's compiled kernel (``asm``, ``metadata``) of a ``Unit``; ``folder`` takes its text."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": unit.warps, "num_stages": unit.stages}
    if "device_assert" in unit.text:  # which is nothing without; integers may go on to wrap
        options |= {"debug": True, "sanitize_overflow": False}
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


def main() -> None:
    """Pickled (fields of units, arch, folder for texts) on stdin; on stdout what ``pack`` makes of each."""
    fields, arch, folder = pickle.load(sys.stdin.buffer)
    units = [SimpleNamespace(**one) for one in fields]
    results = [pack(compile_unit(unit, arch, folder)) for unit in units]
    pickle.dump(results, sys.stdout.buffer)

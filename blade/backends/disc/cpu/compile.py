# SPDX-License-Identifier: Apache-2.0
"""MLIR kernels -> one relocatable object for the host, in process, by the LLVM in the torch-mlir wheel."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blade.backends.disc.cpu.target import Target

_PIPELINE = (
    "builtin.module(canonicalize,cse,convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,convert-func-to-llvm,convert-ub-to-llvm,"
    "reconcile-unrealized-casts)"
)

_NOTHING = (("nothing", "llvm.func @nothing() {\n    llvm.return\n}\n"),)


def why_unavailable() -> str | None:
    """``None`` where kernels can be compiled, else a sentence with the fix."""
    try:
        import torch_mlir.execution_engine  # noqa: F401
    except ImportError as error:
        return f"torch-mlir cannot be imported ({error}); install the package torch-mlir."
    return None


def compile_kernels(kernels: Sequence[tuple[str, str]], target: Target) -> bytes:
    """One ELF object with every kernel of ``(name, MLIR text)``; names must differ.

    Without kernels it holds one function nobody calls, so that it is still an object.

    The code is for the host, whose features ``target.isa`` lists.
    """
    assert len({name for name, _ in kernels}) == len(kernels), [name for name, _ in kernels]
    with tempfile.TemporaryDirectory(prefix="blade-") as folder:
        path = Path(folder) / "kernels.o"
        load(kernels or _NOTHING).dump_to_object_file(str(path))
        return path.read_bytes()


def load(kernels: Sequence[tuple[str, str]]) -> Any:
    """The kernels as a torch-mlir ``ExecutionEngine`` of this process (``raw_lookup`` gives addresses)."""
    from torch_mlir import execution_engine, ir, passmanager
    from torch_mlir._mlir_libs import _mlirRegisterEverything  # noqa: F401

    with ir.Context():
        module = ir.Module.parse(_module(kernels))
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        engine = execution_engine.ExecutionEngine(module, opt_level=3, enable_pic=True)
    # Code is generated at the first lookup; before it there is nothing to write out.
    for name, _ in kernels:
        engine.raw_lookup(name)
    return engine


def _module(kernels: Sequence[tuple[str, str]]) -> str:
    """One module: every kernel's functions, each external declared once."""
    lines: dict[str, None] = {}
    bodies = []
    for _, text in kernels:
        body = []
        for line in text.splitlines():
            if line.startswith("llvm.func") and not line.endswith("{"):
                lines.setdefault(line)
            else:
                body.append(line)
        bodies.append("\n".join(body))
    return "module {\n" + "\n".join([*lines, *bodies]) + "\n}\n"

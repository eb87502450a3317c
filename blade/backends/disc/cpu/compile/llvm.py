# SPDX-License-Identifier: Apache-2.0
"""Compile MLIR to native code with the LLVM in the torch-mlir wheel, also in a separate process (``serve``).

    objects = [compile_kernel(name, text) for name, text in kernels]

This file imports nothing of blade or torch: a process that only compiles starts in 0.1 s.
"""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

_PIPELINE = (
    "builtin.module(canonicalize,cse,convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,convert-func-to-llvm,convert-ub-to-llvm,"
    "reconcile-unrealized-casts)"
)
OPTIONS = (
    f"{_PIPELINE} O3 pic"  # besides its text, the CPU and torch-mlir, an object depends on this
)


def compile_kernel(name: str, text: str) -> bytes:
    """The relocatable ELF object of one kernel."""
    with tempfile.TemporaryDirectory(prefix="blade-") as folder:
        path = os.path.join(folder, "kernel.o")
        load([(name, text)]).dump_to_object_file(path)
        with open(path, "rb") as file:
            return file.read()


def load(kernels: Sequence[tuple[str, str]]) -> Any:
    """The kernels as a torch-mlir ``ExecutionEngine`` of this process (``raw_lookup`` gives addresses)."""
    from torch_mlir import execution_engine, ir, passmanager
    from torch_mlir._mlir_libs import _mlirRegisterEverything  # noqa: F401

    # Parsing loads further dialects as it meets them: loading all there are takes longer than compiling a small kernel.
    with ir.Context(load_on_create_dialects=["llvm"]):
        module = ir.Module.parse(_module(kernels))
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        engine = execution_engine.ExecutionEngine(module, opt_level=3, enable_pic=True)
    # Code is generated at the first lookup; before it there is no object to dump.
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


def serve(requests: Any) -> None:
    """Answer lists of (name, MLIR text), each with the list of their objects (``blade.process.frames.Requests``)."""
    for kernels in requests:
        requests.answer([compile_kernel(name, text) for name, text in kernels])

# SPDX-License-Identifier: Apache-2.0
"""Sizes of tensors as values in generated code."""

from collections.abc import Sequence

import sympy

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.ir.kernel import Dim


class MlirSizes:
    """Values of ``Dim`` expressions in code: ints are constants, symbols come from the ``ints`` argument."""

    def __init__(self, known: Sequence[sympy.Expr]) -> None:
        self.known = tuple(known)
        self.values: dict[sympy.Expr, SsaValue] = {}

    def load(self, code: MlirBuilder) -> None:
        """Read every entry of ``%ints``."""
        for k, expression in enumerate(self.known):
            address = code.op(
                f"llvm.getelementptr %ints[{k}] : (!llvm.ptr) -> !llvm.ptr, i64", "ptr", 1
            )
            self.values[expression] = code.op(
                f"llvm.load {address.name} : !llvm.ptr -> i64", "i64", 1
            )

    def value(self, code: MlirBuilder, dim: Dim) -> SsaValue:
        """``dim`` as an i64 scalar, usable from here on."""
        if isinstance(dim, int) or dim.is_Integer:
            return code.constant(int(dim), "i64")
        if dim not in self.values:
            assert isinstance(dim, (sympy.Add, sympy.Mul)), dim
            parts = [self.value(code, a) for a in dim.args]
            total = parts[0]
            for part in parts[1:]:
                total = (
                    code.add(total, part) if isinstance(dim, sympy.Add) else code.mul(total, part)
                )
            self.values[dim] = total
        return self.values[dim]

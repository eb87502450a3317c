# SPDX-License-Identifier: Apache-2.0
"""State shared by all passes over one row: pointers, sizes, uniform values, scratch."""

import math

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.sizes import MlirSizes
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Access,
    Accessing,
    Compute,
    Const,
    Dim,
    Gather,
    Index,
    Kernel,
    Load,
    Size,
    Store,
)
from blade.backends.disc.ir.kernel_schedule import KernelSchedule

_BYTES = {"f32": 4, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "f16": 2}


class RowEmitter:
    """Call ``enter`` once per function, ``start`` once per row, then uniforms and passes in plan order."""

    def __init__(
        self, kernel: Kernel, plan: KernelSchedule, sizes: MlirSizes, lanes: int, width: int = 1
    ) -> None:
        self.kernel, self.plan, self.sizes, self.lanes = kernel, plan, sizes, lanes
        self.width = width  # rows that are walked together
        self.code = MlirBuilder()
        self.pointers: list[SsaValue] = []
        self.scratch: dict[int, SsaValue] = {}  # kept value -> pointer to its row
        self.bases: dict[Access, SsaValue] = {}  # access -> pointer at inner index 0 of this row
        self.uniforms: dict[int, SsaValue] = {}
        self.spread: dict[tuple[int, int], SsaValue] = {}  # (uniform, lanes) -> broadcast
        self.index: list[SsaValue] = []
        self.low = self.high = SsaValue("", "i64", 1)
        self.length: int | None = None
        self.multiple = 1  # divides high - low

    # --- once per function ---

    def enter(self) -> None:
        self.sizes.load(self.code)
        for dim in self._dims():
            self.sizes.value(self.code, dim)
        for k in range(len(self.kernel.args)):
            self.pointers.append(self._pointer(k))
        kept = [v for step in self.plan.passes for v in step.keep]
        if not kept:
            return
        at = self._pointer(len(self.kernel.args))
        for v in kept:
            self.scratch[v] = at
            at = self.gep(at, self._kept_bytes(v), "i8")

    def scratch_bytes(self) -> Dim:
        """Upper bound of the scratch that ``enter`` lays out."""
        total: Dim = 0
        for v in self.scratch:
            size = _BYTES[self.kept_type(v)] * self.width
            total = total + self.kernel.inner * size + self._padding(v)
        return total

    def kept_type(self, v: int) -> str:
        """Element type in scratch: the register type, i1 as a byte."""
        element = memory.REGISTER[self.dtype(v)]
        return "i8" if element == "i1" else element

    def dtype(self, v: int) -> torch.dtype:
        stmt = self.kernel.body[v]
        assert not isinstance(stmt, Store), stmt
        return stmt.dtype

    def _padding(self, v: int) -> int:
        # Scratch is read and written in whole vectors, even by the masked remainder of a row.
        return max(64, 2 * self.lanes * _BYTES[self.kept_type(v)])

    def _kept_bytes(self, v: int) -> SsaValue:
        size, padding = _BYTES[self.kept_type(v)] * self.width, self._padding(v)
        inner = number(self.kernel.inner)
        if inner is not None:
            return self.code.constant((inner * size + padding) // 64 * 64, "i64")
        length = self.code.mul(
            self.sizes.value(self.code, self.kernel.inner), self.code.constant(size, "i64")
        )
        padded = self.code.add(length, self.code.constant(padding, "i64"))
        return self.code.apply("arith.andi", padded, self.code.constant(-64, "i64"))

    def _dims(self) -> list[Dim]:
        dims = [*self.kernel.outer, self.kernel.inner]
        for stmt in self.kernel.body:
            if isinstance(stmt, Accessing):
                dims += [*stmt.access.strides, stmt.access.offset]
                dims += [stmt.stride] if isinstance(stmt, Gather) else []
            elif isinstance(stmt, Size):
                dims.append(stmt.value)
        return dims

    def _pointer(self, k: int) -> SsaValue:
        address = self.code.op(
            f"llvm.getelementptr %ptrs[{k}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr", "ptr", 1
        )
        return self.code.op(f"llvm.load {address.name} : !llvm.ptr -> !llvm.ptr", "ptr", 1)

    # --- once per row ---

    def start(
        self,
        index: list[SsaValue],
        low: SsaValue,
        high: SsaValue,
        length: int | None,
        multiple: int,
    ) -> None:
        """Start the row at outer ``index``; inner runs over [low, high), of ``length`` if that is known."""
        self.index, self.low, self.high, self.length = index, low, high, length
        self.multiple = multiple if length is None else math.gcd(length, 64)
        self.bases, self.uniforms, self.spread = {}, {}, {}
        for stmt in self.kernel.body:
            if isinstance(stmt, Accessing) and stmt.access not in self.bases:
                self.bases[stmt.access] = self._base(stmt.access)

    def gep(self, pointer: SsaValue, offset: SsaValue, element: str) -> SsaValue:
        """As ``MlirFunction.at``."""
        text = f"llvm.getelementptr nusw {pointer.name}[{offset.name}] : (!llvm.ptr, i64) -> !llvm.ptr, {element}"
        return self.code.op(text, "ptr", 1)

    def memory_type(self, access: Access) -> str:
        return memory.MEMORY[self.kernel.args[access.arg].dtype]

    def _base(self, access: Access) -> SsaValue:
        code, pointer = self.code, self.pointers[access.arg]
        offset = None if number(access.offset) == 0 else self.sizes.value(code, access.offset)
        for stride, i in zip(access.strides, self.index):
            if number(stride) == 0:
                continue
            step = i if number(stride) == 1 else code.mul(i, self.sizes.value(code, stride))
            offset = step if offset is None else code.add(offset, step)
        return pointer if offset is None else self.gep(pointer, offset, self.memory_type(access))

    def gathered(self, stmt: Gather, index: SsaValue) -> SsaValue:
        """The base of ``stmt``'s access, moved by ``index`` (a scalar) along the selected axis."""
        index = pointwise.cast(self.code, index, self.dtype(stmt.index), torch.int64)
        if number(stmt.stride) != 1:
            index = self.code.mul(index, self.sizes.value(self.code, stmt.stride))
        return self.gep(self.bases[stmt.access], index, self.memory_type(stmt.access))

    def compute_uniforms(self, numbers: tuple[int, ...]) -> None:
        for i in numbers:
            self.uniforms[i] = self._uniform(i)

    def _uniform(self, i: int) -> SsaValue:
        code, stmt = self.code, self.kernel.body[i]
        if isinstance(stmt, Const):
            return code.constant(stmt.value, memory.REGISTER[stmt.dtype])
        if isinstance(stmt, Size):
            return pointwise.cast(code, self.sizes.value(code, stmt.value), torch.int64, stmt.dtype)
        if isinstance(stmt, Index):
            return pointwise.cast(code, self.index[stmt.dim], torch.int64, stmt.dtype)
        if isinstance(stmt, (Load, Gather)):
            element, base = self.memory_type(stmt.access), self.bases[stmt.access]
            if isinstance(stmt, Gather):
                base = self.gathered(stmt, self.uniforms[stmt.index])
            raw = code.op(f"llvm.load {base.name} : !llvm.ptr -> {element}", element, 1)
            return memory.decode(code, raw, stmt.dtype)
        assert isinstance(stmt, Compute), stmt
        args = [self.uniforms[a] for a in stmt.args]
        return pointwise.compute(code, stmt.op, args, self.dtype(stmt.args[-1]), stmt.dtype)

    def store_uniforms(self, stores: tuple[int, ...]) -> None:
        for i in stores:
            stmt = self.kernel.body[i]
            assert isinstance(stmt, Store), stmt
            value = memory.encode(
                self.code, self.uniforms[stmt.value], self.kernel.args[stmt.access.arg].dtype
            )
            self.code.line(
                f"llvm.store {value.name}, {self.bases[stmt.access].name} : {value.type}, !llvm.ptr"
            )

    def as_lanes(self, i: int, lanes: int) -> SsaValue:
        """Uniform ``i`` in every lane. The first call emits the broadcast: make it outside the loop."""
        stmt = self.kernel.body[i]
        if isinstance(stmt, Const):
            return self.code.constant(stmt.value, memory.REGISTER[stmt.dtype], lanes)
        if (i, lanes) not in self.spread:
            self.spread[i, lanes] = self.code.broadcast(self.uniforms[i], lanes)
        return self.spread[i, lanes]

# SPDX-License-Identifier: Apache-2.0
"""Vectors between memory and registers: contiguous, masked, strided, and the scratch rows."""

from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue, type_text
from blade.backends.disc.cpu.emit.row import RowEmitter
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import Access, Gather


@dataclass(frozen=True)
class Chunk:
    """``count`` vectors (or scalars) that start at inner index ``at``; ``mask``: the lanes that exist."""

    at: SsaValue
    lanes: int
    count: int
    mask: SsaValue | None = None


def load(
    row: RowEmitter, access: Access, at: SsaValue, chunk: Chunk, base: SsaValue | None = None
) -> SsaValue:
    """Load one vector of raw elements from inner index ``at``; ``base`` replaces the access's own base."""
    code, lanes, element = row.code, chunk.lanes, row.memory_type(access)
    base = row.bases[access] if base is None else base
    if lanes == 1:
        return _load_one(row, access, at, base)
    if number(access.strides[-1]) != 1:
        parts = [_load_one(row, access, shift(row, at, k), base) for k in range(lanes)]
        return code.from_lanes(parts)
    return vector_load(row, row.gep(base, at, element), element, lanes, chunk.mask)


def vector_load(
    row: RowEmitter, address: SsaValue, element: str, lanes: int, mask: SsaValue | None
) -> SsaValue:
    """Load adjacent elements; those outside ``mask`` are not touched."""
    code, kind, align = row.code, type_text(element, lanes), _align(element)
    if mask is None:
        text = f"llvm.load {address.name} {{alignment = {align} : i64}} : !llvm.ptr -> {kind}"
        return code.op(text, element, lanes)
    # Masked-out lanes compute on ones: no division by zero, no slow denormals.
    ones = code.constant(1, element, lanes)
    text = f"llvm.intr.masked.load {address.name}, {mask.name}, {ones.name}"
    types = f"(!llvm.ptr, {mask.type}, {kind}) -> {kind}"
    return code.op(f"{text} {{alignment = {align} : i32}} : {types}", element, lanes)


def gather(row: RowEmitter, stmt: Gather, index: SsaValue, at: SsaValue) -> SsaValue:
    """Load one vector of raw elements, each at its own ``index``."""
    parts = []
    for k in range(index.lanes):
        base = row.gathered(stmt, row.code.lane(index, k))
        parts.append(_load_one(row, stmt.access, shift(row, at, k), base))
    return row.code.from_lanes(parts)


def store(row: RowEmitter, access: Access, value: SsaValue, at: SsaValue, chunk: Chunk) -> None:
    """Store one vector of raw elements at inner index ``at``."""
    code = row.code
    if chunk.lanes == 1 or number(access.strides[-1]) != 1:
        for k in range(chunk.lanes):
            address = _element(row, access, shift(row, at, k), row.bases[access])
            one = code.lane(value, k)
            code.line(f"llvm.store {one.name}, {address.name} : {one.element}, !llvm.ptr")
        return
    vector_store(row, value, row.gep(row.bases[access], at, value.element), chunk.mask)


def vector_store(
    row: RowEmitter, value: SsaValue, address: SsaValue, mask: SsaValue | None
) -> None:
    """Store to adjacent elements, except those outside ``mask``."""
    if mask is None:
        _store_vector(row, value, address)
        return
    text = f"llvm.intr.masked.store {value.name}, {address.name}, {mask.name}"
    types = f"{value.type}, {mask.type} into !llvm.ptr"
    row.code.line(f"{text} {{alignment = {_align(value.element)} : i32}} : {types}")


def reload(row: RowEmitter, v: int, at: SsaValue, lanes: int) -> SsaValue:
    """Load value ``v`` from its scratch row."""
    element = row.kept_type(v)
    address = row.gep(row.scratch[v], at, element)
    kind = type_text(element, lanes)
    text = f"llvm.load {address.name} {{alignment = {_align(element)} : i64}} : !llvm.ptr -> {kind}"
    raw = row.code.op(text, element, lanes)
    return memory.decode(row.code, raw, torch.bool) if row.dtype(v) == torch.bool else raw


def keep(row: RowEmitter, v: int, at: SsaValue, value: SsaValue) -> None:
    """Store value ``v`` to its scratch row, in whole vectors even at the end of a row."""
    if value.element == "i1":
        value = memory.encode(row.code, value, torch.bool)
    _store_vector(row, value, row.gep(row.scratch[v], at, value.element))


def shift(row: RowEmitter, at: SsaValue, by: int) -> SsaValue:
    """``at + by``."""
    return at if by == 0 else row.code.add(at, row.code.constant(by, "i64"))


def _store_vector(row: RowEmitter, value: SsaValue, address: SsaValue) -> None:
    align = f"{{alignment = {_align(value.element)} : i64}}"
    row.code.line(f"llvm.store {value.name}, {address.name} {align} : {value.type}, !llvm.ptr")


def _load_one(row: RowEmitter, access: Access, at: SsaValue, base: SsaValue) -> SsaValue:
    element, address = row.memory_type(access), _element(row, access, at, base)
    return row.code.op(f"llvm.load {address.name} : !llvm.ptr -> {element}", element, 1)


def _element(row: RowEmitter, access: Access, at: SsaValue, base: SsaValue) -> SsaValue:
    stride = access.strides[-1]
    if number(stride) == 0:
        return base
    if number(stride) != 1:
        at = row.code.mul(at, row.sizes.value(row.code, stride))
    return row.gep(base, at, row.memory_type(access))


def _align(element: str) -> int:
    return int(element[1:]) // 8

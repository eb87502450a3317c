# SPDX-License-Identifier: Apache-2.0
"""The epilogue of generated int8 products on a tile of sums: scales, bias, residual, activation, bytes.

    y = sums[r, j] * scales[j] + bias[j]                    sums: floats, exact integers
    y = body(y, (residual[r, j] - zero) * scale)            statements of the kernel IR
    C[r, j] = y, or clamp(round(y * inverse) + point, low, high)

Numbers that differ between layers are arguments (bits of floats), so that layers share code. A product
without a body does this in registers; others put a tile's sums on the stack and call one shared function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.ir.kernel import Compute, Const, Stmt
from blade.core.disk_cache import digest

REQUANTIZE = ("inverse", "point", "low", "high")
RESIDUAL = ("residual_scale", "residual_zero")


@dataclass(frozen=True)
class Int8Epilogue:
    """``body``: as in backends/disc/ir/int8_epilogue.py; ``residual``: its element type, "" without one."""

    body: tuple[Stmt, ...] = ()
    residual: str = ""
    to_bytes: bool = False

    @property
    def is_plain(self) -> bool:
        return not self.body

    @property
    def element(self) -> str:
        """The element type of C."""
        return "i8" if self.to_bytes else "f32"

    @property
    def pointers(self) -> tuple[str, ...]:
        return ("residual",) if self.residual else ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the arguments that are bits of floats, in the order of a call."""
        return RESIDUAL * (self.residual == "i8") + REQUANTIZE * self.to_bytes

    @property
    def name(self) -> str:
        """The suffix of a kernel's name."""
        body = f"_{self.residual}_{digest([repr(self.body)])[:10]}" if self.body else ""
        return body + "_bytes" * self.to_bytes

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The function's arguments: ``pitch`` and ``ldc`` are row strides; a residual has C's layout."""
        pointers = ("sums", "scales", "bias", *self.pointers, "c")
        sizes = ("pitch", "ldc", "rows", "columns")
        return [*((p, POINTER) for p in pointers), *((n, "i64") for n in (*sizes, *self.numbers))]

    def signature(self, name: str) -> MlirRoutine:
        """The function that finishes a tile, with an empty body."""
        return MlirRoutine(name, self.arguments)

    def quantized(self, f: MlirFunction, y: SsaValue) -> SsaValue:
        """``y`` quantized to bytes."""
        inverse, point, low, high = (number(f, name, y.lanes) for name in REQUANTIZE)
        y = f.add(f.apply("math.roundeven", f.mul(y, inverse)), point)
        y = f.select(f.compare("ogt", low, y), low, y)
        y = f.select(f.compare("olt", high, y), high, y)
        return f.convert("arith.trunci", f.convert("arith.fptosi", y, "i32"), "i8")


FLOATS = Int8Epilogue()
"""The epilogue that stores the product itself."""


def number(f: MlirFunction, name: str, lanes: int) -> SsaValue:
    """A float argument in every lane."""
    bits = f.convert("arith.trunci", f[name], "i32")
    return f.broadcast(f.from_bits(bits), lanes)


def finish_text(epilogue: Int8Epilogue, name: str, lanes: int) -> str:
    """MLIR of the function ``name`` on ``rows`` by ``columns`` sums, both arbitrary."""
    f = MlirRoutine(name, epilogue.arguments, lanes)
    whole = f.floor_to(f["columns"], lanes)
    with f.range(0, f["rows"]) as r:
        with f.range(0, whole, lanes) as j:
            _cell(f, epilogue, r, j, None)
        with f.when(f.test("slt", whole, f["columns"])):
            _cell(f, epilogue, r, whole, f.first_lanes(f.minus(f["columns"], whole)))
    return f.text()


def _cell(
    f: MlirRoutine, epilogue: Int8Epilogue, r: SsaValue, j: SsaValue, mask: SsaValue | None
) -> None:
    """A vector of row ``r`` from column ``j`` on. Sums, scales and biases extend beyond the last column."""
    exact = f.get(f.at(f["sums"], f.product(r, f["pitch"])), j, lanes=f.lanes)
    scales, bias = (f.get(f[name], j, lanes=f.lanes) for name in ("scales", "bias"))
    place = f.sum(f.product(r, f["ldc"]), j)
    known = [f.fma(exact, scales, bias)]
    if epilogue.residual:
        at = f.at(f["residual"], place, epilogue.residual)
        known.append(_residual(f, epilogue, at, mask))
    y = followed(f, epilogue.body, known)
    if epilogue.to_bytes:
        y = epilogue.quantized(f, y)
    to = f.at(f["c"], place, epilogue.element)
    if mask is None:
        f.store(y, to)
    else:
        f.store_masked(y, to, mask)


def _residual(
    f: MlirRoutine, epilogue: Int8Epilogue, at: SsaValue, mask: SsaValue | None
) -> SsaValue:
    element = epilogue.residual
    x = f.load(at, f.lanes, element) if mask is None else f.load_masked(at, mask, element)
    if element == "f32":
        return x
    scale, zero = (number(f, name, f.lanes) for name in RESIDUAL)
    return f.mul(f.sub(f.convert("arith.uitofp", x, "f32"), zero), scale)


def followed(f: MlirFunction, body: Sequence[Stmt], leaves: Sequence[SsaValue]) -> SsaValue:
    """The value of the last statement of ``body``, or the first leaf if it is empty."""
    known, kinds = list(leaves), [torch.float32] * len(leaves)
    lanes = leaves[0].lanes
    for stmt in body:
        if isinstance(stmt, Const):
            known.append(f.constant(stmt.value, memory.REGISTER[stmt.dtype], lanes))
        else:
            assert isinstance(stmt, Compute), stmt
            args = [known[a] for a in stmt.args]
            source = kinds[stmt.args[-1]]
            known.append(pointwise.compute(f, stmt.op, args, source, stmt.dtype))
        kinds.append(stmt.dtype)
    return known[-1] if body else known[0]

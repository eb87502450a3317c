# SPDX-License-Identifier: Apache-2.0
"""Tiling of a kernel's iteration space: the dimensions of a tile's rows, and sizes as text.

A tile is ``rows x columns``. Columns run along inner. Rows run over all outer dimensions, merged; or, if
memory is contiguous along one outer dimension (``beside``), along that one, and programs run over the
others.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from blade.backends.disc.gpu.emit.pairs import paired_accesses
from blade.backends.disc.gpu.emit.tile_table import ACCESS_BYTES
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import Accessing, Dim, Kernel


class TritonSizes:
    """Texts of ``Dim`` expressions in a kernel: parameters ``n0``, ``n1``, .. and expressions of them."""

    def __init__(self, known: Sequence[sympy.Expr]) -> None:
        self.names: dict[sympy.Expr, str] = {e: f"n{k}" for k, e in enumerate(known)}

    def text(self, dim: Dim) -> str:
        """``dim`` as an expression; a literal for constants."""
        constant = number(dim)
        if constant is not None:
            return str(constant)
        if dim in self.names:
            return self.names[dim]
        assert isinstance(dim, (sympy.Add, sympy.Mul)), dim
        sign = " + " if isinstance(dim, sympy.Add) else " * "
        return f"({sign.join(map(self.text, dim.args))})"

    def product(self, dims: Sequence[Dim]) -> str:
        """The product of ``dims`` by factors: simplified as a whole, it might need other parameters."""
        known = [n for n in map(number, dims) if n is not None]
        texts = [self.text(d) for d in dims if number(d) is None]
        factor = math.prod(known)
        texts = [str(factor), *texts] if factor != 1 or not texts else texts
        return f"({' * '.join(texts)})" if len(texts) > 1 else texts[0]

    def annotate(self, dim: Dim, multiple: int) -> str | None:
        """A line that tells the compiler that ``dim`` is a multiple of ``multiple``; ``None`` if it knows.

        ``tl.multiple_of`` has no effect on parameters.
        """
        if number(dim) is not None or multiple == 1:
            return None
        name = f"m{sum(n.startswith('m') for n in self.names.values())}"
        line = f"{name} = {self.text(dim)} // {multiple} * {multiple}"
        self.names[dim] = name
        return line


def product(dims: Sequence[Dim]) -> Dim:
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def ceil_div(dim: Dim, by: int) -> Dim:
    """The number of pieces of size ``by``."""
    if isinstance(dim, int):
        return -(-dim // by)
    result: Dim = FloorDiv(dim + (by - 1), by)
    return result


@dataclass(frozen=True)
class Alignment:
    """The condition that every row begins at a multiple of ``elements``, so that accesses are vectors.

    ``open``: expressions whose divisibility is unknown; ``None``: the condition cannot hold. ``known``: those of pairs
    that are multiples by their form, which the compiler does not see.
    """

    elements: int
    open: tuple[sympy.Expr, ...] | None
    known: tuple[sympy.Expr, ...] = ()

    @property
    def holds(self) -> sympy.Basic:
        """The condition, for a choice at run time."""
        assert self.open is not None
        needed = [e for e in self.open if not _follows(e, self.open)]
        return sympy.And(*(sympy.Eq(Mod(e, self.elements), 0) for e in needed))


def alignment(kernel: Kernel) -> Alignment:
    """The alignment of the accesses that are contiguous along inner, each alone or two together."""
    whole = [
        s.access
        for s in kernel.body
        if isinstance(s, Accessing) and number(s.access.strides[-1]) == 1
    ]
    pairs = list(paired_accesses(kernel))
    itemsizes = {kernel.args[a.arg].dtype.itemsize for a in (*whole, *pairs)}
    elements = ACCESS_BYTES // min(
        itemsizes - {1} or itemsizes or {1}
    )  # 8 bytes at a time suffice for uint8
    open_: dict[sympy.Expr, None] = {}
    for access in (*whole, *pairs):
        needed = [kernel.inner * access.strides[-1], *access.strides[:-1], access.offset]
        unknown = [d for d in needed if not known_multiple(kernel, d, elements)]
        if any(number(d) is not None for d in unknown):
            continue  # this access is never aligned; ignore it for the others
        open_.update(dict.fromkeys(d for d in unknown if isinstance(d, sympy.Expr)))
    if whole and number(kernel.inner) is not None and int(kernel.inner) % elements:
        return Alignment(elements, None)
    apart = [d for a in pairs for d in a.strides[:-1] if isinstance(d, sympy.Expr)]
    known = [d for d in apart if number(d) is None and known_multiple(kernel, d, elements)]
    return Alignment(elements, tuple(open_), tuple(dict.fromkeys(known)))


def streamed(kernel: Kernel) -> int:
    """Bytes moved per element of the iteration space; values that rows share are in the cache."""
    whole = {
        (s.access, kernel.args[s.access.arg].dtype.itemsize)
        for s in kernel.body
        if isinstance(s, Accessing)
        and number(s.access.strides[-1]) != 0
        and (not kernel.outer or any(number(stride) != 0 for stride in s.access.strides[:-1]))
    }
    return sum(itemsize for _, itemsize in whole)


def _follows(dim: sympy.Expr, known: Collection[sympy.Expr]) -> bool:
    """Is ``dim`` an integer multiple of another expression in ``known``?"""
    factors = sympy.Mul.make_args(dim)
    bases = [f.base if f.is_Pow and f.exp.is_positive else f for f in factors]
    whole = all(b.is_Integer or b.is_Symbol for b in bases)
    return whole and any(b in known and b != dim for b in bases)


def known_multiple(kernel: Kernel, dim: Dim, of: int) -> bool:
    """Is ``dim`` a multiple of ``of``, by its form and by the facts about inner?"""
    constant = number(dim)
    if constant is not None:
        return constant % of == 0
    if dim == kernel.inner and kernel.multiple % of == 0:
        return True
    assert isinstance(dim, sympy.Expr), dim
    if isinstance(dim, sympy.Add):
        return all(known_multiple(kernel, a, of) for a in dim.args)
    if any(a.is_Pow or (a.is_Rational and not a.is_Integer) for a in dim.args):
        return False
    return isinstance(dim, sympy.Mul) and any(known_multiple(kernel, a, of) for a in dim.args)

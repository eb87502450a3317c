# SPDX-License-Identifier: Apache-2.0
"""The row of einsum: sums, products and one matrix product per pair of operands.

    "bhqd,bhkd->bhqk"    batch axes b h, left q, right k, contracted d:  matmul(x, y.mT)

Operands are contracted from left to right. A product with a constant matrix and no batch axis is a
``linear``, whose weights can be packed. A label repeated within an operand makes it a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.disc.frontend.ops.library import FLOATS
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """A tensor and the label of each of its axes."""

    value: Value
    labels: tuple[str, ...]

    def size(self, label: str) -> Dim:
        return self.value.shape[self.labels.index(label)]


@lowers(aten.einsum.default)
def einsum(
    lo: Lowering, equation: str, tensors: Sequence[Value], path: Any = None, **_: Any
) -> Value:
    equation = equation.replace(" ", "")
    terms, output = _read(equation, tensors)
    if output is None or any(t.dtype not in FLOATS for t in tensors):
        return _called(lo, equation, tensors)
    terms = _without_ones(lo, terms)
    if not _is_consistent(terms):
        return _called(lo, equation, tensors)
    first, *others = terms
    while others:
        second, *others = others
        kept = {*output, *(label for term in others for label in term.labels)}
        first = _contract(lo, _summed(lo, first, {*kept, *second.labels}), second, kept)
    first = _summed(lo, first, set(output))
    present = [label for label in output if label in first.labels]  # missing labels have size 1
    result = lo.b.permute(first.value, [first.labels.index(label) for label in present])
    return lo.b.reshape(result, lo.shape)


def _called(lo: Lowering, equation: str, tensors: Sequence[Value]) -> Value:
    result: Value = lo.call(aten.einsum.default, (equation, list(tensors), None))
    return result


def _read(equation: str, tensors: Sequence[Value]) -> tuple[list[Term], tuple[str, ...] | None]:
    """Terms and output labels; the latter ``None`` if not expressible. An ellipsis stands for ``.0
    .1 ...``.
    """
    inputs, arrow, output = equation.partition("->")
    words = inputs.split(",")
    if not arrow:
        letters = sorted({c for c in inputs if c.isalpha()})
        once = "".join(c for c in letters if inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + once
    spreads = [
        len(t.shape) - len(word.replace("...", "")) if "..." in word else 0
        for word, t in zip(words, tensors, strict=True)
    ]
    most = max(spreads)
    terms = [
        Term(tensor, _labels(word, spread, most))
        for word, spread, tensor in zip(words, spreads, tensors, strict=True)
    ]
    if any(len(set(t.labels)) != len(t.labels) for t in terms):
        return terms, None
    return terms, _labels(output, most, most)


def _labels(word: str, spread: int, most: int) -> tuple[str, ...]:
    """Labels of one term; the axes of its ellipsis are aligned at the end."""
    before, dots, after = word.partition("...")
    middle = [f".{k}" for k in range(most - spread, most)] if dots else []
    return (*before, *middle, *after)


def _without_ones(lo: Lowering, terms: Sequence[Term]) -> list[Term]:
    """Terms without axes of size 1, which broadcast or vanish."""
    thin = []
    for term in terms:
        kept = [k for k, d in enumerate(term.value.shape) if d != 1]
        value = lo.b.reshape(term.value, [term.value.shape[k] for k in kept])
        thin.append(Term(value, tuple(term.labels[k] for k in kept)))
    return thin


def _is_consistent(terms: Sequence[Term]) -> bool:
    sizes: dict[str, Dim] = {}
    return all(
        sizes.setdefault(label, size) == size
        for term in terms
        for label, size in zip(term.labels, term.value.shape, strict=True)
    )


def _summed(lo: Lowering, term: Term, kept: set[str]) -> Term:
    """``term`` summed over the labels that are not ``kept``."""
    gone = [k for k, label in enumerate(term.labels) if label not in kept]
    if not gone:
        return term
    rest = [k for k in range(len(term.labels)) if k not in gone]
    total = lo.b.reduce("sum", term.value, gone)
    total = lo.b.reshape(total, [term.value.shape[k] for k in rest])
    return Term(total, tuple(term.labels[k] for k in rest))


def _contract(lo: Lowering, a: Term, b: Term, kept: set[str]) -> Term:
    b = _summed(lo, b, {*kept, *a.labels})
    shared = [label for label in a.labels if label in b.labels]
    batch = [label for label in shared if label in kept]
    inner = [label for label in shared if label not in kept]
    left = [label for label in a.labels if label not in shared]
    right = [label for label in b.labels if label not in shared]
    labels = (*batch, *left, *right)
    shape = [(a if label in a.labels else b).size(label) for label in labels]
    if not inner:
        x, y = (_spread(lo, term, labels, shape) for term in (a, b))
        return Term(lo.b.pointwise("mul", x, y), labels)
    x = _arranged(lo, a, batch, left, inner)
    if batch:
        y = _arranged(lo, b, batch, inner, right)
        product = lo.b.make("matmul", (x, y), (*x.shape[:-1], y.shape[-1]), lo.dtype)
    else:
        y = _arranged(lo, b, batch, right, inner)
        product = lo.b.make("linear", (x, y), (*x.shape[:-1], y.shape[0]), lo.dtype)
    return Term(lo.b.reshape(product, shape), labels)


def _arranged(
    lo: Lowering, term: Term, batch: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> Value:
    """``term`` as [batch ..., rows, columns], with several labels of rows or columns merged."""
    order = [term.labels.index(label) for label in (*batch, *rows, *columns)]
    shape = [term.size(label) for label in batch]
    shape += [numel([term.size(label) for label in part]) for part in (rows, columns)]
    return lo.b.reshape(lo.b.permute(term.value, order), shape)


def _spread(lo: Lowering, term: Term, labels: Sequence[str], shape: Sequence[Dim]) -> Value:
    ordered = [label for label in labels if label in term.labels]
    value = lo.b.permute(term.value, [term.labels.index(label) for label in ordered])
    places = [labels.index(label) for label in ordered]
    if len(places) == len(labels):
        return value
    return lo.b.make("broadcast", (value,), shape, value.dtype, axes=tuple(places))

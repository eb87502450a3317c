# SPDX-License-Identifier: Apache-2.0
"""Sizes to run op samples at, eager's answer, and what counts as the same answer.

An answer may be off by twice what eager itself is off from a computation in float64, plus a few units
in the last place.
"""

from collections.abc import Iterator, Sequence

import torch
from op_samples import Sample
from torch.utils._pytree import tree_leaves

USUAL = {"a": 3, "b": 5, "c": 4, "d": 6}
ODD = {"a": 7, "b": 37, "c": 9, "d": 13}
Outputs = list[torch.Tensor]


def sizes_of(sample: Sample) -> Iterator[dict[str, int]]:
    """The sample's sizes, then odd, smallest, and mixed ones."""
    letters = sorted({a for s in sample.specs for a in s.axes if a.isalpha()})
    usual = {a: (sample.sizes or {}).get(a, USUAL[a]) for a in letters}
    yield usual
    yield {a: usual[a] * 2 + 1 if sample.sizes else ODD[a] for a in letters}
    yield dict.fromkeys(letters, 1)
    for letter in letters:
        yield {**usual, letter: 0}
        yield {**usual, letter: 1}


def eager(sample: Sample, tensors: Sequence[torch.Tensor]) -> Outputs | None:
    """What torch gives; ``None`` where it raises."""
    try:
        with torch.no_grad():
            return [t for t in tree_leaves(sample.function(*tensors)) if t is not None]
    except (RuntimeError, IndexError, ValueError, AssertionError, TypeError):
        return None


def why_not(sample: Sample, tensors: Sequence[torch.Tensor]) -> str:
    """What torch says where it does not take these; empty where it does."""
    try:
        with torch.no_grad():
            sample.function(*tensors)
    except (RuntimeError, IndexError, ValueError, AssertionError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def exact(sample: Sample, tensors: Sequence[torch.Tensor]) -> Outputs:
    return eager(sample, [t.double() if t.is_floating_point() else t for t in tensors]) or []


def different(got: Outputs, want: Outputs, ideal: Outputs, fused: float = 0.0) -> str:
    """Empty, or how ``got`` differs from eager by more than eager's own rounding (``fused``: ``Sample.fused``)."""
    if len(got) != len(want):
        return f"{len(got)} results, eager has {len(want)}"
    ideal = ideal if [i.shape for i in ideal] == [w.shape for w in want] else want
    found = (one(*t, fused) for t in zip(got, want, ideal, strict=True))
    return "; ".join(f"result {k}: {text}" for k, text in enumerate(found) if text)


def one(got: torch.Tensor, want: torch.Tensor, ideal: torch.Tensor, fused: float = 0.0) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, eager has {want.dtype}{list(want.shape)}"
    if not want.dtype.is_floating_point:
        return "" if torch.equal(got, want) else f"{off(got != want, got, want)}"
    ideal = ideal.double()
    exact = got.double() == ideal  # eager's vectorized fp32 GELU makes NaN of an infinity
    misplaced = (got.isnan() != want.isnan()) & ~exact
    if misplaced.any():
        return "NaN: " + off(misplaced, got, want)
    equal = (got == want) | (got.isnan() & want.isnan()) | exact
    own = (want.double() - ideal).abs()
    own = max(own[own.isfinite()].tolist(), default=0.0)
    info = torch.finfo(want.dtype)
    if want.dtype == torch.float64:  # there is no better reference to measure eager by
        own = 8 * info.eps * max([1.0, *ideal[ideal.isfinite()].abs().flatten().tolist()])
    allowed = 2 * own + 8 * info.eps * ideal.abs() + 8 * info.tiny + fused
    wrong = ~equal & ~((got.double() - ideal).abs() <= allowed)
    wrong |= ~equal & (got.isinf() | want.isinf())
    return off(wrong, got, want) if wrong.any() else ""


def off(where: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    place = where.nonzero()[0].tolist()
    return f"at {place} {got[tuple(place)].item()!r}, eager {want[tuple(place)].item()!r}"

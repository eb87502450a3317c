# SPDX-License-Identifier: Apache-2.0
"""Compare the form of two results: dtypes, devices, sizes, strides, and the positions of NaN and infinity.

    why_other_form(got, want)             # None, or "output 1 is float64 and the original's is float32"

``tolerance`` compares their values.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from blade.graph.shapes.memory_format import lies_as
from blade.verification.tolerance import largest_of, magnitude, underflow, unit


def why_other_form(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    strides: bool = True,
    truths: Sequence[torch.Tensor] | None = None,
    places: bool = True,
    like: Sequence[torch.Tensor | None] = (),
    overflows: bool = False,
) -> str | None:
    """Return a sentence on the first difference in number, dtype, shape, device, strides, NaN or infinity.

    ``like``, ``truths``: of each output, as in ``why_other_output``.
    """
    if len(got) != len(want):
        return f"it returned {len(got)} tensors and the original {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        alike, truth = like[i] if like else None, truths[i] if truths else None
        if sentence := why_other_output(i, a, b, strides, truth, places, alike, overflows):
            return sentence
    return None


def why_other_output(
    number: int,
    got: torch.Tensor,
    want: torch.Tensor,
    strides: bool = True,
    truth: torch.Tensor | None = None,
    places: bool = True,
    like: torch.Tensor | None = None,
    overflows: bool = False,
) -> str | None:
    """Return a sentence on the first difference of one output in dtype, shape, device, strides, NaN or infinity.

    ``places``: whether positions of NaN and infinity are compared. ``like``: the original's output at other
    sizes, whose memory layout is allowed as well.

    A NaN, infinity or number that an fp64 run has as well (``truth``) is right, whatever the original has:
    torch's vectorized fp32 GELU turns an infinity into NaN on some CPUs, and its 16-bit attention turns one
    NaN of a hidden key into NaN for rows that do not see it.

    ``overflows``: the inputs are finite. A float16 number that only the original lacks has overflowed there,
    and any number is right: sums of which some pass 65,504 are as sensitive as they are large.
    """
    for what in ("dtype", "device", "shape", *(["stride"] if strides else [])):
        mine, theirs = _property(got, what), _property(want, what)
        if mine != theirs and not (what == "stride" and like is not None and lies_as(got, like)):
            return f"output {number} has {what} {mine} and the original's has {theirs}"
    if places and (sentence := _misplaced(got, want, truth, overflows)):
        return f"output {number} {sentence}"
    return None


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of one shape have equal elements, NaNs at the same places."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _property(tensor: torch.Tensor, what: str) -> object:
    if what == "shape":
        return tuple(tensor.shape)
    if what == "stride":  # the stride of a dimension of size 0 or 1 means nothing
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        return tuple(s if n > 1 and tensor.numel() else None for n, s in pairs)
    return getattr(tensor, what)


def misplaced(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Mask of the elements of which one is NaN or an infinity that the other is not."""
    return _other_nans(got, want) | _other_infinities(got, want)


def far_apart(got: torch.Tensor, want: torch.Tensor, limit: float) -> torch.Tensor:
    """Mask of the elements that differ by more than ``limit`` of the largest magnitude, or in what is infinite."""
    least = limit * unit(magnitude(want), underflow(want.dtype))
    return misplaced(got, want) | ((got - want).abs() > least)


def _other_nans(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return torch.isnan(got) ^ torch.isnan(want)


def _other_infinities(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (torch.isinf(got) | torch.isinf(want)) & (got != want)


def _misplaced(
    got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor | None, overflows: bool
) -> str | None:
    if not (want.is_floating_point() or want.is_complex()) or torch.equal(got, want):
        return None
    if isfinite(largest_of(got)) and isfinite(largest_of(want)):
        return None
    right = torch.zeros_like(got, dtype=torch.bool)
    if truth is not None and truth.shape == got.shape and not truth.is_complex():
        right = torch.isinf(got) & (got == truth) | torch.isnan(got) & torch.isnan(truth)
        right |= _is_number_of(got, truth)
        if overflows and got.dtype == torch.float16:
            right |= torch.isfinite(got) & torch.isfinite(truth) & ~torch.isfinite(want)
    wrong = _other_nans(got, want) & ~right
    if bool(wrong.any()):
        return f"differs from the original in {int(wrong.sum())} places of NaN"
    if want.is_complex():
        return None
    wrong = _other_infinities(got, want) & ~right
    if bool(wrong.any()):
        return f"differs from the original in {int(wrong.sum())} places of infinity"
    return None


def _is_number_of(got: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Mask of elements that are finite in both and agree in half of their digits."""
    digits = torch.finfo(got.dtype).eps ** 0.5
    finite = torch.isfinite(truth)
    largest = float(truth[finite].abs().max()) if bool(finite.any()) else 0.0
    is_near: torch.Tensor = (got - truth).abs() <= digits * largest
    return finite & torch.isfinite(got) & is_near

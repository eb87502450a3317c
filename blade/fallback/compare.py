# SPDX-License-Identifier: Apache-2.0
"""How far two results are apart: first their form, then their numbers.

    form(got, want)             # None, or "output 1 is float64 and the original's is float32"
    errors(got, want, truth)    # how far got is from want, and both from the truth (an fp64 run)

Errors are the largest absolute difference over the largest magnitude of the reference, both taken
over the elements that are finite: near-zero elements of a large tensor do not count as wrong, a
misplaced NaN or infinity always does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from blade.graph.memory_order import lies_as

# What rounding alone may cost besides twice the original's own error; lightning-thunder's
# ``assert_closer`` idea: an engine is right if it is about as far from the truth as the original is.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}
FP32_TOLERANCE = 1e-6
# A run in fp64 from which the original is further than this is none of the same function: no truth. What is
# small beside the other outputs may be rounding alone (the gradient of a bias that cancels out).
NO_TRUTH = {torch.float16: 0.5, torch.bfloat16: 0.5}
FP32_NO_TRUTH = 0.05
ROUNDING = 1e-5  # of float32; of halves it is one of theirs
# A truth so much smaller than the original's answer says that the answer is rounding and nothing else.
CANCELLED = 1e-6
_PART = 1 << 18  # elements compared at a time, so that what that takes stays in cache
# Without an fp64 run the original's own error is unknown; these are torch.testing's defaults for rtol.
BLIND_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-7}
BLIND_FP32_TOLERANCE = 1.3e-6


@dataclass(frozen=True)
class Errors:
    """Of one tensor: engine against original, and both against the truth (``None`` without one)."""

    error: float
    error_fp64: float | None
    original_fp64: float | None


def form(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    strides: bool = True,
    truths: Sequence[torch.Tensor] | None = None,
    places: bool = True,
    like: Sequence[torch.Tensor] = (),
) -> str | None:
    """A sentence on the first difference in number, dtype, shape, device, strides, NaN or infinity.

    ``places``: whether those of NaN and infinity are compared. ``like``: the original's outputs at other sizes, as
    which these may lie in memory as well.

    What an fp64 run has as well (``truths``), NaN, infinity or a number, is right, whatever the original has:
    torch's vectorized fp32 GELU turns an infinity into NaN on some CPUs, and its attention for halves one NaN of
    a hidden key into NaN for rows that do not see it.
    """
    if len(got) != len(want):
        return f"it returned {len(got)} tensors and the original {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for what in ("dtype", "device", "shape", *(["stride"] if strides else [])):
            mine, theirs = _property(a, what), _property(b, what)
            if mine != theirs and not (what == "stride" and like and lies_as(a, like[i])):
                return f"output {i} has {what} {mine} and the original's has {theirs}"
        if places and (sentence := _misplaced(a, b, truths[i] if truths else None)):
            return f"output {i} {sentence}"
    return None


def narrowest(graph: torch.fx.Graph) -> torch.dtype | None:
    """The half that something of ``graph`` is computed in, whatever its results are; ``None``: nothing is."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "call_function")
    return next((v.dtype for v in values if getattr(v, "dtype", None) in NO_TRUTH), None)


def errors(
    got: torch.Tensor,
    want: torch.Tensor,
    truth: torch.Tensor | None,
    scale: float = 0.0,
    half: torch.dtype | None = None,
) -> Errors:
    """Of tensors of equal form; those of ints and bools are 0 where equal, else infinite.

    ``scale`` is the largest magnitude among all outputs; ``half``: what they were computed in, in part. Where all
    cancels out (a norm of equal numbers: ``want`` is its rounding, ``truth`` that of fp64) an engine makes no error
    that is about as near to the truth as the original.
    """
    if not (want.is_floating_point() or want.is_complex()):
        exact = 0.0 if torch.equal(got, want) else float("inf")
        return Errors(exact, None, None)
    if truth is None or truth.shape != want.shape:
        return Errors(distance(got, want), None, None)
    (apart, mine, own), largest = _distances(got, want, truth)
    computed = half or want.dtype
    is_far = not own <= NO_TRUTH.get(computed, FP32_NO_TRUTH)
    rounding = torch.finfo(computed).eps if computed in NO_TRUTH else ROUNDING
    if is_far and mine <= 2 * own and is_rounding(want, truth):
        return Errors(0.0, None, None)
    if is_far and not own * largest <= rounding * scale:
        return Errors(apart, None, None)
    return Errors(apart, mine, own)


def _distances(
    got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor
) -> tuple[tuple[float, float, float], float]:
    """``distance`` of got and want, of got and truth, of want and truth; the magnitude of truth."""
    apart, mine, own = [], [], []
    for a, b, t in zip(*(x.flatten().split(_PART) for x in (got, want, truth)), strict=True):
        a, b, t = _wide(a), _wide(b), known_truth(_wide(t), _wide(b))
        ofs = _largest(b), _largest(t)
        apart.append(_difference(a, b, ofs[0]))
        mine.append(_difference(a, t, ofs[1]))
        own.append(_difference(b, t, ofs[1]))
    least = _underflow(want.dtype)
    relative = _relative(apart, least), _relative(mine, least), _relative(own, least)
    return relative, max((m for _, m in own), default=0.0)


def is_rounding(want: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether all of ``want`` cancelled out in ``truth``, an fp64 run: then it is rounding and nothing else."""
    return magnitude(truth) <= CANCELLED * magnitude(want)


def known_truth(truth: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """``truth`` with the numbers of ``want`` where it has none and those are: there the original has to be met.

    A mask of the least float64 overflows where that of the model does not, and all of a run in fp64 is NaN.
    """
    if isfinite(_largest(truth)):
        return truth
    return torch.where(torch.isfinite(want) & ~torch.isfinite(truth), want.to(truth.dtype), truth)


def distance(got: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative error described above; 0 for empty tensors."""
    parts = zip(got.flatten().split(_PART), reference.flatten().split(_PART), strict=True)
    least = _underflow(reference.dtype)
    return _relative([_difference(_wide(a), _wide(b)) for a, b in parts], least)


def _underflow(dtype: torch.dtype) -> float:
    """Below this the last digits of a number are lost: what is no larger has no relative error, like a zero.

    Half of float16's range is below, where numbers are as exact as they are meant to be.
    """
    if dtype is torch.float16 or not dtype.is_floating_point:
        return 0.0
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def _relative(parts: Sequence[tuple[float, float]], least: float) -> float:
    """Of the differences and magnitudes of all parts."""
    difference, largest = (max(values, default=0.0) for values in zip(*parts, strict=True))
    return difference / (largest if largest > least else 1.0)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest finite one."""
    largest = _largest(tensor)
    return largest if isfinite(largest) else _largest(tensor[torch.isfinite(tensor)])


def _difference(
    a: torch.Tensor, b: torch.Tensor, largest: float | None = None
) -> tuple[float, float]:
    """The largest difference and the largest magnitude of ``b`` among the elements finite in both.

    ``largest``: the magnitude of ``b``, if that is known already.
    """
    difference, largest = _largest(a - b), _largest(b) if largest is None else largest
    if isfinite(difference) and isfinite(largest):
        return difference, largest
    both = torch.isfinite(a) & torch.isfinite(b)
    return _largest(a[both] - b[both]), _largest(b[both])


def allowed(dtype: torch.dtype, original_fp64: float | None) -> float:
    """The largest right error: against fp64 if the original's own is known, else against the original."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if original_fp64 is None:
        return BLIND_TOLERANCE.get(dtype, BLIND_FP32_TOLERANCE)
    return 2 * original_fp64 + TOLERANCE.get(dtype, FP32_TOLERANCE)


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; NaN or infinite if an element is."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)
    return max(-float(low), float(high))


def _property(tensor: torch.Tensor, what: str) -> object:
    if what == "shape":
        return tuple(tensor.shape)
    if what == "stride":  # of a dimension of size 0 or 1 it means nothing
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        return tuple(s if n > 1 and tensor.numel() else None for n, s in pairs)
    return getattr(tensor, what)


def _misplaced(got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor | None) -> str | None:
    if not (want.is_floating_point() or want.is_complex()) or torch.equal(got, want):
        return None
    if isfinite(_largest(got)) and isfinite(_largest(want)):
        return None
    right = torch.zeros_like(got, dtype=torch.bool)
    if truth is not None and truth.shape == got.shape and not truth.is_complex():
        right = torch.isinf(got) & (got == truth) | torch.isnan(got) & torch.isnan(truth)
        right |= _is_number_of(got, truth)
    wrong = (torch.isnan(got) ^ torch.isnan(want)) & ~right
    if bool(wrong.any()):
        return f"differs from the original in {int(wrong.sum())} places of NaN"
    if want.is_complex():
        return None
    infinite = torch.isinf(got) | torch.isinf(want)
    wrong = infinite & (got != want) & ~right
    if bool(wrong.any()):
        return f"differs from the original in {int(wrong.sum())} places of infinity"
    return None


def _is_number_of(got: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where both are finite and half of the digits agree."""
    digits = torch.finfo(got.dtype).eps ** 0.5
    finite = torch.isfinite(truth)
    largest = float(truth[finite].abs().max()) if bool(finite.any()) else 0.0
    is_near: torch.Tensor = (got - truth).abs() <= digits * largest
    return finite & torch.isfinite(got) & is_near


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

# SPDX-License-Identifier: Apache-2.0
"""Errors and tolerances: how an error is expressed, and how large it may be, for engines and captured graphs.

    distance(got, want)                     # the error of got
    errors(got, want, truth)                # the same, and both against the fp64 reference
    allowed(dtype, original_fp64)           # the largest right error

An error is the largest absolute difference over the largest magnitude of the reference, both taken over the
elements that are finite: near-zero elements of a large tensor do not count as wrong.

The criterion is that of lightning-thunder's ``assert_closer``: a result is right if its error against fp64 is
at most twice the original's own, plus rounding. An original's error below the usual one (``usual_error``) is
small by chance and counts as the usual one. Engines are always held to this. A captured graph is, where it is
further from its model than ``Tolerance.graph``. Without an fp64 run ``Tolerance.unknown`` bounds engines, and
``Tolerance.graph`` graphs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

import torch

from blade.core.dtypes import HALVES

_HALF, _BFLOAT = (torch.finfo(dtype).eps for dtype in HALVES)


@dataclass(frozen=True)
class Tolerance:
    """Tolerances for results of one dtype, as relative errors (``distance``).

    * ``rounding``: added to twice the original's own error.
    * ``unknown``: for an engine whose original has no known error; torch.testing's defaults for rtol.
    * ``graph``: for a captured graph against its model, before fp64 is run. Tracing runs the very same
      kernels; the slack is for freezing, which folds batch norms into convolutions. 0: values have to be
      equal.
    * ``no_truth``: an fp64 run that is further from the original computes another function and is ignored.
    * ``model_no_truth``: the same for a whole model; ``None``: fp64 is no reference for the model, as it
      computes in fp64 itself, or in complex numbers, which the fp64 run does not widen.
    * ``small``: an output this small beside the others may be rounding alone (the gradient of a bias that
      cancels out).
    * ``recheck``: for a serving engine that is compared with the original again: inputs of users are worse
      conditioned than those of verification.
    """

    rounding: float
    unknown: float
    graph: float
    no_truth: float
    model_no_truth: float | None
    small: float
    recheck: float


# fmt: off
TOLERANCES = {
    #                           rounding  unknown  graph  no_truth  model  small    recheck
    torch.float64:    Tolerance(1e-12,    1e-7,    1e-9,  0.05,     None,  1e-5,    1e-3),
    torch.complex128: Tolerance(1e-12,    1.3e-6,  1e-9,  0.05,     None,  1e-5,    1e-3),
    torch.float32:    Tolerance(1e-6,     1.3e-6,  1e-4,  0.05,     0.05,  1e-5,    1e-3),
    torch.complex64:  Tolerance(1e-6,     1.3e-6,  1e-4,  0.05,     None,  1e-5,    1e-3),
    torch.float16:    Tolerance(_HALF,    1e-3,    1e-2,  0.5,      0.5,   _HALF,   0.05),
    torch.bfloat16:   Tolerance(_BFLOAT,  1.6e-2,  5e-2,  0.5,      0.5,   _BFLOAT, 0.05),
}
_OTHERS =             Tolerance(1e-6,     1.3e-6,  0.0,   0.05,     None,  1e-5,    1e-3)  # floats of 8 bits
# fmt: on

# A more exact result smaller than the original's by this factor shows that the original's is pure rounding. One in
# float32 is a reference for 16 bits, whose rounding is 8,000 times as large or more.
CANCELLED, CANCELLED_IN_FLOAT32 = 1e-6, 1e-3
# Two fp64 runs of a model that differ by more drew different numbers.
SAME_RUN = 1e-6
FEW = 64  # elements of an output that may be small, or exact, by chance
# Elements compared at a time: on a CPU temporaries stay in cache, elsewhere each comparison waits for the device.
_PART, _LARGE_PART = 1 << 18, 1 << 22


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    return TOLERANCES.get(dtype, _OTHERS)


def allowed(dtype: torch.dtype, original_fp64: float | None) -> float:
    """Return the largest right error, against fp64 if the original's own is known, else the original."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if original_fp64 is None:
        return tolerance_of(dtype).unknown
    return 2 * original_fp64 + tolerance_of(dtype).rounding


def usual_error(errors: Iterable[float | None]) -> float:
    """Return the median of the original's known ``errors``; smaller ones, small by chance, count as this."""
    return median([e for e in errors if e is not None] or [0.0])


@dataclass(frozen=True)
class RelativeErrors:
    """Errors of one tensor: engine against original, and both against fp64 (``None`` without an fp64 run).

    ``is_amplified``: the original is too far from fp64 for that to be a reference, and the engine at most twice
    as far.
    """

    error: float
    error_fp64: float | None
    original_fp64: float | None
    is_amplified: bool = False


def narrowest(graph: torch.fx.Graph) -> torch.dtype | None:
    """Return the 16-bit dtype of any value in ``graph``, whatever its results are, or ``None``."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "call_function")
    return next((v.dtype for v in values if getattr(v, "dtype", None) in HALVES), None)


def errors(
    got: torch.Tensor,
    want: torch.Tensor,
    truth: torch.Tensor | None,
    scale: float = 0.0,
    half: torch.dtype | None = None,
) -> RelativeErrors:
    """Return the errors of tensors of equal form; for ints and bools 0 where equal, else infinite.

    ``scale`` is the largest magnitude among all outputs; ``half``: a 16-bit dtype used in part of the
    computation. Where everything cancels out (a norm of equal numbers: ``want`` and ``truth`` are rounding),
    an engine about as near to the fp64 reference as the original has no error, nor one that is as near as a
    rounding of the largest output: how little the original is off is chance.
    """
    if not (want.is_floating_point() or want.is_complex()):
        exact = 0.0 if torch.equal(got, want) else float("inf")
        return RelativeErrors(exact, None, None)
    if truth is None or truth.shape != want.shape:
        return RelativeErrors(distance(got, want), None, None)
    (apart, mine, own), largest = _distances(got, want, truth)
    limits = tolerance_of(half or want.dtype)
    is_far = not own <= limits.no_truth
    is_small = mine * largest <= limits.rounding * scale
    part = CANCELLED_IN_FLOAT32 if truth.dtype is torch.float32 else CANCELLED
    if is_far and (mine <= 2 * own or is_small) and is_rounding(want, truth, part):
        return RelativeErrors(0.0, None, None)
    if is_far and not own * largest <= limits.small * scale:
        return RelativeErrors(apart, None, None, is_amplified=mine <= 2 * own)
    return RelativeErrors(apart, mine, own)


def share_apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the share of the elements that differ; 0 without elements."""
    return float((got != want).double().mean()) if want.numel() else 0.0


def own_error(want: torch.Tensor, truth: torch.Tensor | None, part: float = 1.0) -> float | None:
    """Return the error of a model's answer; ``None`` if ``truth`` is no usable reference.

    ``part``: of the magnitude that errors are relative to, what ``want`` has.
    """
    limit = tolerance_of(want.dtype).model_no_truth
    if truth is None or truth.shape != want.shape or limit is None:
        return None
    own = distance(want, known_reference(truth, want)) * part
    return own if own <= limit else None


def excess_error(
    got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor, own: float, part: float = 1.0
) -> float | None:
    """Return the error of ``got`` if it exceeds what an original with the error ``own`` allows."""
    seen = distance(got, known_reference(truth, want)) * part
    return None if seen <= allowed(got.dtype, own) else seen


def _distances(
    got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor
) -> tuple[tuple[float, float, float], float]:
    """``distance`` of got and want, of got and truth, of want and truth; the magnitude of truth."""
    apart, mine, own = [], [], []
    for a, b, t in _parts(got, want, truth):
        a, b, t = _wide(a), _wide(b), known_reference(_wide(t), _wide(b))
        ofs = largest_of(b), largest_of(t)
        apart.append(_difference(a, b, ofs[0]))
        mine.append(_difference(a, t, ofs[1]))
        own.append(_difference(b, t, ofs[1]))
    least = underflow(want.dtype)
    relative = _relative(apart, least), _relative(mine, least), _relative(own, least)
    return relative, max((m for _, m in own), default=0.0)


def is_rounding(want: torch.Tensor, truth: torch.Tensor, part: float = CANCELLED) -> bool:
    """Whether all of ``want`` cancelled out in ``truth``, so that ``want`` is pure rounding."""
    return magnitude(truth) <= part * magnitude(want)


def known_reference(truth: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Replace non-finite values of ``truth`` by those of ``want`` where these are finite.

    A mask of the least float64 may overflow where the model's does not, so that its fp64 run is all NaN.
    """
    if isfinite(largest_of(truth)):
        return truth
    return torch.where(torch.isfinite(want) & ~torch.isfinite(truth), want.to(truth.dtype), truth)


def distance(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative error described above; 0 for empty tensors."""
    return _relative(_differences(got, reference), underflow(reference.dtype))


def underflow(dtype: torch.dtype) -> float:
    """Return the magnitude below which a number loses its last digits: smaller values have no relative error.

    Half of float16's range is below it, where numbers are as exact as they are meant to be.
    """
    if dtype is torch.float16 or not dtype.is_floating_point:
        return 0.0
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def _differences(got: torch.Tensor, want: torch.Tensor) -> list[tuple[float, float]]:
    """Return ``_difference`` of each part."""
    return [_of_equal(a, b) or _difference(_wide(a), _wide(b)) for a, b in _parts(got, want)]


def _of_equal(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float] | None:
    """Return ``_difference`` of tensors that are equal and finite, which need not be widened."""
    if got.dtype != want.dtype or not torch.equal(got, want):
        return None
    largest = largest_of(want)
    return (0.0, largest) if isfinite(largest) else None


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape into pieces of the same places, without a copy of a whole one."""
    size, most = tensors[0].numel(), _PART if tensors[0].device.type == "cpu" else _LARGE_PART
    if all(t.is_contiguous() for t in tensors):
        yield from zip(*(t.view(-1).split(most) for t in tensors), strict=True)
        return
    if size <= most:
        yield tensors
        return
    axis = next(k for k, n in enumerate(tensors[0].shape) if n > 1)
    count = tensors[0].shape[axis]
    for pieces in zip(*(t.split(max(1, count * most // size), axis) for t in tensors), strict=True):
        yield from _parts(*pieces)


def _largest(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the largest difference and the largest magnitude of all parts."""
    difference, size = (max(values, default=0.0) for values in zip(*parts, strict=True))
    return difference, size


def unit(largest: float, least: float) -> float:
    """Return what an error is relative to: the largest magnitude, or 1 where that is not above ``least``."""
    return largest if largest > least else 1.0


def _relative(parts: Sequence[tuple[float, float]], least: float) -> float:
    """Return the relative error from the differences and magnitudes of all parts."""
    difference, largest = _largest(parts)
    return difference / unit(largest, least)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    largest = largest_of(tensor)
    return largest if isfinite(largest) else largest_of(tensor[torch.isfinite(tensor)])


def _difference(
    a: torch.Tensor, b: torch.Tensor, largest: float | None = None
) -> tuple[float, float]:
    """Return the largest difference and the largest magnitude of ``b`` among the elements finite in both.

    ``largest``: the magnitude of ``b``, if it is known already.
    """
    difference, largest = largest_of(a - b), largest_of(b) if largest is None else largest
    if isfinite(difference) and isfinite(largest):
        return difference, largest
    both = torch.isfinite(a) & torch.isfinite(b)
    return largest_of(a[both] - b[both]), largest_of(b[both])


def difference(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute difference and the largest magnitude of ``want``, in float64."""
    return _largest(_differences(got, want))


def largest_of(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; NaN or infinite if an element is."""
    if not tensor.numel():
        return 0.0
    ends = torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)
    low, high = torch.stack(tuple(ends)).tolist()  # waits once
    return abs(max(-float(low), float(high)))  # zeros may give -0.0, which reads badly


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

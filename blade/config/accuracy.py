# SPDX-License-Identifier: Apache-2.0
"""``Config.accuracy_budget``: the error allowed to engines of reduced precision, and its measure.

    budget = parse({"snr_db": 30})
    error = output_error(got, want)         # of one output at one sample
    budget.allows(error)                    # error.relative <= 10 ** (-30 / 20)

The relative error is |got - want| / |want| in the Euclidean norm over all finite elements of an output; the
signal-to-noise ratio is -20 log10 of it. Both, and the cosine, are per output and sample: the worst counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log10, nan, sqrt
from typing import Any, Literal

import torch

ELSEWHERE = 4.0
"""At inputs other than the samples, whose ranges are not calibrated, the error may be this many times larger:
enough to tell a coarse engine from a wrong one."""

_FORMS = (
    'a relative error in (0, 1) like 0.05, {"cosine": 0.99}, {"snr_db": 30}, or '
    '{"metric": fn, "samples": [(inputs, label), ...], "drop": 0.01}'
)
_PART = 1 << 20  # elements compared at a time


@dataclass(frozen=True)
class OutputError:
    """Error of an engine's output against the original's; ``relative`` and ``1 - cosine`` are 0 if equal."""

    relative: float
    cosine: float

    @property
    def snr_db(self) -> float:
        return -20 * log10(self.relative) if self.relative > 0 else inf


EXACT = OutputError(0.0, 1.0)


@dataclass(frozen=True)
class AccuracyBudget:
    """``bound`` is the largest relative error, the least cosine or SNR, or the largest drop of ``metric``.

    ``metric(outputs, labels)`` is a number, the higher the better. ``outputs`` are the model's answers to the
    inputs of ``samples``, which are pairs of (inputs, label).
    """

    kind: Literal["relative", "cosine", "snr_db", "metric"]
    bound: float
    metric: Callable[[Sequence[Any], Sequence[Any]], float] | None = None
    samples: tuple[tuple[Any, Any], ...] = ()

    def allows(self, error: OutputError) -> bool:
        """Whether ``error`` is within the budget; not for a metric, which does not rate single outputs."""
        if self.kind == "cosine":
            return error.cosine >= self.bound
        if self.kind == "snr_db":
            return error.snr_db >= self.bound
        assert self.kind == "relative", self
        return error.relative <= self.bound

    def scaled(self, factor: float) -> "AccuracyBudget":
        """The budget with ``factor`` times the error: half the budget is ``scaled(0.5)``."""
        if self.kind == "cosine":  # 1 - cosine grows with the square of the error
            return replace(self, bound=max(-1.0, 1 - (1 - self.bound) * factor**2))
        if self.kind == "snr_db":
            return replace(self, bound=self.bound - 20 * log10(factor))
        return replace(self, bound=self.bound * factor)

    def __str__(self) -> str:
        names = {
            "relative": "a relative error of at most",
            "cosine": "a cosine of at least",
            "snr_db": "an SNR in dB of at least",
            "metric": "a drop of the metric of at most",
        }
        return f"{names[self.kind]} {self.bound:.4g}"


DEFAULT = AccuracyBudget("relative", 0.1)
"""20 dB, or a cosine of 0.995: int8 with a scale per token and channel usually stays well within it."""


def parse(value: object) -> AccuracyBudget:
    """Parse a user's ``Config.accuracy_budget``; raises ``ValueError`` that says what is allowed."""
    if isinstance(value, AccuracyBudget):
        return value
    if _is_number(value):
        return AccuracyBudget("relative", _between(float(value), 0, 1, "a relative error"))  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ValueError(f"it is {_FORMS}")
    if set(value) == {"cosine"} and _is_number(value["cosine"]):
        return AccuracyBudget("cosine", _between(float(value["cosine"]), -1, 1, "a cosine"))
    if set(value) == {"snr_db"} and _is_number(value["snr_db"]) and isfinite(value["snr_db"]):
        return AccuracyBudget("snr_db", float(value["snr_db"]))
    if set(value) == {"metric", "samples", "drop"}:
        return _metric(value)
    raise ValueError(f"it is {_FORMS}")


def output_error(got: torch.Tensor, want: torch.Tensor) -> OutputError:
    """The error of ``got``, of the shape of ``want``. For ints and bools, ``relative`` is the square root of
    the fraction of elements that differ."""
    if not want.numel() or torch.equal(got, want):
        return EXACT
    if not (want.is_floating_point() or want.is_complex()):
        share = float((got != want).double().mean())
        return OutputError(sqrt(share), 1 - share)
    noise = signal = other = product = 0.0
    parts = zip(got.flatten().split(_PART), want.flatten().split(_PART), strict=True)
    for a, b in ((_real(x), _real(y)) for x, y in parts):
        finite = torch.isfinite(a) & torch.isfinite(b)
        a, b = a.where(finite, 0), b.where(finite, 0)
        noise += float((a - b).square().sum())
        signal += float(b.square().sum())
        other += float(a.square().sum())
        product += float((a * b).sum())
    if not noise:
        return EXACT
    cosine = product / sqrt(signal * other) if signal and other else nan
    return OutputError(sqrt(noise / signal) if signal else inf, cosine)


def worst(errors: Iterable[OutputError]) -> OutputError:
    """The largest relative error and the smallest cosine; ``EXACT`` without any errors."""
    every = [EXACT, *errors]
    cosines = [-1.0 if e.cosine != e.cosine else e.cosine for e in every]
    return OutputError(max(e.relative for e in every), min(cosines))


def _metric(value: Mapping[str, Any]) -> AccuracyBudget:
    if not callable(value["metric"]):
        raise ValueError('"metric" is a function of (outputs, labels) that returns a number')
    samples = value["samples"]
    pairs = tuple(samples) if isinstance(samples, Iterable) else ()
    if not pairs or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise ValueError('"samples" is a non-empty list of pairs (inputs, label)')
    drop = value["drop"]
    if not _is_number(drop) or not isfinite(drop) or drop < 0:
        raise ValueError(f'"drop" is a number >= 0, in the units of the metric; got {drop!r}')
    return AccuracyBudget("metric", float(drop), value["metric"], pairs)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _between(value: float, low: float, high: float, what: str) -> float:
    if not low < value < high:
        raise ValueError(f"{what} lies between {low} and {high}, got {value!r}; it is {_FORMS}")
    return value


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()

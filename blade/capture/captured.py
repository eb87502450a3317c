# SPDX-License-Identifier: Apache-2.0
"""What capture hands on: the frozen graph, and what is needed to judge anything made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blade.reason import Reason


@dataclass(frozen=True)
class Limit:
    """Dimension ``axis`` of tensor ``index`` among the leaves of a sample: ``low <= size <= high``."""

    index: int
    axis: int
    low: int
    high: int


@dataclass(frozen=True)
class Tie:
    """Two dimensions (tensor among the leaves of a sample, axis) that must have one size."""

    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class Reference:
    """What the original answered to ``sample``: one answer per call, two if calls change its state.

    An answer is the output and the arguments as they were left (forward may write to them). ``axes``
    are the dimensions (tensor, axis) resized against the first sample.
    """

    sample: tuple[Any, ...]
    answers: tuple[tuple[Any, Any], ...]
    axes: frozenset[tuple[int, int]]
    what: str


@dataclass(frozen=True)
class Captured:
    """A private, frozen copy of the user's model.

    ``module.graph`` is what the later stages view and cut; its inputs are ``self`` and one value per
    entry of a sample. It was never executed: the executor would keep the graph as it was at the first
    call. ``original`` computes the reference (same positional arguments, the user's own code on a
    deep copy, tensors out in ``module``'s order). ``samples`` are the user's, as positional tuples in
    the graph's input order, then those made for ``Config.dynamic_tuning_shapes``; ``probes`` are
    samples derived from them with other sizes (distinct, no varied size is 0 or 1) that ``original``
    was seen to accept. ``limits`` are the dimensions at which ``module`` raises outside of a range,
    because it is a trace that was seen to be wrong there, ``ties`` those at which it raises unless
    they are equal. ``fixed`` are the (input of the graph, axis)
    that the user declared to have one size only. ``references`` are what ``original`` answered at the
    samples and at other sizes within ``limits``, kept so that nothing has to be run twice. ``calibration`` are
    further samples of the user's, of the same sizes as ``samples``, at which nothing was run yet. ``key`` is what
    ``capture`` was told of its graph, and ``is_compared`` is false where it was told that the graph is known.
    """

    module: torch.jit.ScriptModule
    original: Callable[..., Any]
    samples: tuple[tuple[Any, ...], ...]
    probes: tuple[tuple[Any, ...], ...]
    reasons: tuple[Reason, ...]
    how: str  # "trace" or "script"
    limits: tuple[Limit, ...] = ()
    ties: tuple[Tie, ...] = ()
    fixed: frozenset[tuple[int, int]] = frozenset()
    references: tuple[Reference, ...] = ()
    calibration: tuple[tuple[Any, ...], ...] = ()
    key: str | None = None
    is_compared: bool = True

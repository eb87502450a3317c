# SPDX-License-Identifier: Apache-2.0
"""The result of capture: the frozen graph, and the data to verify anything made from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from blade.core.reason import Reason


@dataclass(frozen=True)
class SizeRange:
    """A range, ``low <= size <= high``, of dimension ``axis`` of tensor ``index`` among a sample's leaves."""

    index: int
    axis: int
    low: int
    high: int


@dataclass(frozen=True)
class EqualSizes:
    """Two dimensions (tensor among the leaves of a sample, axis) that must be equal."""

    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class Path:
    """One way through the model's code, and the conditions under which it answers."""

    conditions: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """The original's answers to ``sample``: one per call, two if calls change its state.

    An answer is the output, and the arguments after the call (forward may write to them). ``axes`` are the
    dimensions (tensor, axis) whose size differs from the first sample's. ``how`` ``sample`` was derived from the
    first one: its sizes by axis, or the name of a change of its contents; ``None`` for a sample.
    """

    sample: tuple[Any, ...]
    answers: tuple[tuple[Any, Any], ...]
    axes: frozenset[tuple[int, int]]
    what: str
    how: Mapping[tuple[int, int], int] | str | None = None


@dataclass(frozen=True)
class Captured:
    """A private, frozen copy of the user's model.

    Later stages view and cut ``module.graph``; its inputs are ``self`` and one value per entry of a sample.
    It was never executed: the executor would keep the graph of the first call. ``original`` computes the
    reference: the user's own code on a deep copy, with the same positional arguments and tensor outputs in
    ``module``'s order. ``samples``: the user's, as positional tuples in the graph's input order, then those
    made for ``Config.dynamic_tuning_shapes``. ``probes``: samples at derived shapes (distinct sizes, no
    varied size is 0 or 1) that ``original`` accepted. ``limits``: ranges outside of which ``module`` raises,
    because the trace is wrong there. ``equal_sizes``: dimensions at which it raises unless they are equal.
    ``fixed``: (input of the graph, axis) that the user declared to have one size only. ``references``:
    answers of ``original`` at the samples and at other sizes within ``limits``, kept to avoid a second run.
    ``calibration``: further samples of the user's, of the same sizes as ``samples``, not run yet. ``key``:
    the graph's key that ``capture`` received, and ``record`` what is to be kept under it. ``is_compared`` is false
    if there was such a record: then ``references`` are few. ``paths``: of a trace; elsewhere ``module`` raises.
    ``original_number``: under which the original answers there in this process (``runtime/originals.py``), or 0.
    ``paths_number``: under which calls are counted by path; ``ends``: the paths in the order of their ends.
    ``structure``: of the model's output, if ``module`` returns another one (``core/structure.py``).
    ``in_place``: ``module`` before it was made functional, if it wrote to parts of tensors.
    """

    module: torch.jit.ScriptModule
    original: Callable[..., Any]
    samples: tuple[tuple[Any, ...], ...]
    probes: tuple[tuple[Any, ...], ...]
    reasons: tuple[Reason, ...]
    how: str  # "trace", "script" or "export"
    limits: tuple[SizeRange, ...] = ()
    equal_sizes: tuple[EqualSizes, ...] = ()
    fixed: frozenset[tuple[int, int]] = frozenset()
    references: tuple[Reference, ...] = ()
    calibration: tuple[tuple[Any, ...], ...] = ()
    key: str | None = None
    record: bytes = b""
    is_compared: bool = True
    paths: tuple[Path, ...] = ()
    original_number: int = 0
    structure: str | None = None
    paths_number: int = 0
    ends: tuple[int, ...] = ()
    in_place: torch.jit.ScriptModule | None = None

    @property
    def without_engines(self) -> torch.jit.ScriptModule:
        """The module that serves where no engine does, and that engines are compared with."""
        return self.module if self.in_place is None else self.in_place

    def is_fixed(self, name: str, axis: int) -> bool:
        """Whether the user declared one size for ``axis`` of the graph's input called ``name``."""
        _, *inputs = (v.debugName() for v in self.module.graph.inputs())
        return name in inputs and (inputs.index(name), axis) in self.fixed

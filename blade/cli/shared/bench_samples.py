# SPDX-License-Identifier: Apache-2.0
"""The samples of ``bench``: the user's, or random ones as the file remembers them, at those or other sizes.

samples = remembered(report, path, shapes={"x": (8, 128)}, batch=4)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.cli.shared.options import UsageError
from blade.errors import InputError
from blade.report import Report
from blade.report.graph import InputReport

DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
"""Dtypes by the names that reports use."""

Shapes = Mapping[str, tuple[int, ...]]
"""Sizes by the name of the input; "" is that of the only one."""


@dataclass(frozen=True)
class BenchSample:
    """One call: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def rows(self) -> int:
        """The size of the first axis of the first tensor; 1 without one."""
        return next((int(t.shape[0]) for t in self.tensors if t.dim()), 1)


def given(inputs: Any) -> list[BenchSample]:
    """The user's samples."""
    return [_sample(one) for one in (inputs if isinstance(inputs, list) else [inputs])]


def remembered(
    shown: Report, path: Path, shapes: Shapes | None = None, batch: int | None = None
) -> list[BenchSample]:
    """Random samples with the sizes, dtypes and ranges of the report; ``InputError`` if it has none.

    With ``shapes`` or ``batch`` it is one sample: the first one remembered, with the inputs of ``shapes`` at
    these sizes, and the first axis ``batch`` long wherever it is as long as that of the first input.
    """
    if not shown.inputs:
        raise InputError(
            f"{path}: it does not say what its samples looked like (they held more than tensors, or it was "
            "written by an older blade); give them with --inputs SAMPLES.pt"
        )
    rows = [_resized(shown.inputs[0], shapes or {}, batch)] if shapes or batch else shown.inputs
    generator = torch.Generator().manual_seed(0)
    return [BenchSample(tuple(make(one, generator) for one in row), {}) for row in rows]


def parse_shapes(entries: Sequence[str]) -> Shapes:
    """``["x=8x128"]``, or ``["8x128"]`` for the only input; raises ``UsageError``."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        name, equals, text = entry.rpartition("=")
        sizes = [] if text == "()" else text.split("x")
        if not all(size.isdecimal() for size in sizes) or (equals and not name) or name in found:
            raise UsageError(f"--shape {entry}: NAME=8x128 is expected, once per input")
        found[name] = tuple(map(int, sizes))
    return found


def _resized(
    row: Sequence[InputReport], shapes: Shapes, batch: int | None
) -> Sequence[InputReport]:
    names = [one.name for one in row]
    if "" in shapes and len(row) == 1:
        shapes = {names[0]: shapes[""]}
    if unknown := [name for name in shapes if name not in names]:
        what = f"{unknown[0]!r} is no input" if unknown[0] else "say of which input"
        raise UsageError(f"--shape: {what}; the inputs are {', '.join(names)}")
    rows = next((one.shape[0] for one in row if one.shape), None)
    found = []
    for one in row:
        shape = tuple(shapes.get(one.name, one.shape))
        if batch is not None and one.shape and one.shape[0] == rows and shape:
            shape = (batch, *shape[1:])
        found.append(replace(one, shape=shape))
    return found


def make(one: InputReport, generator: torch.Generator) -> torch.Tensor:
    """A random tensor between the smallest and largest value seen; standard normal if these are unknown."""
    dtype = DTYPES.get(one.dtype)
    if dtype is None:
        raise InputError(f"{one.name}: no random tensors are made of dtype {one.dtype!r}")
    low, high = one.low, one.high
    if dtype == torch.bool:
        return torch.rand(one.shape, generator=generator) * 2 < (0 if high == 0 else 1 + (low or 0))
    if dtype.is_complex:
        return torch.randn(one.shape, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        top = int(high or 0) + 1
        return torch.randint(int(low or 0), top, one.shape, generator=generator).to(dtype)
    if low is None or high is None:
        return torch.randn(one.shape, generator=generator).to(dtype)
    unit = torch.rand(one.shape, generator=generator, dtype=torch.float64)
    return (unit * (high - low) + low).to(dtype)


def _sample(one: Any) -> BenchSample:
    if isinstance(one, Mapping):
        return BenchSample((), dict(one))
    return BenchSample((one,) if isinstance(one, torch.Tensor) else tuple(one), {})

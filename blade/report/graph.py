# SPDX-License-Identifier: Apache-2.0
"""A report's record of the model itself: its ops with their edges, and a summary of its samples.

NodeReport("%y = aten::add", "aten::add", "cluster_0", (3, 4), "encoder.layer.0 model.py:12")
InputReport("input_ids", "int64", (2, 16), 101.0, 29000.0)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NodeReport:
    """One op. ``inputs`` are the positions, in the report, of the ops it reads from.

    ``name``: as in ``Reason.subject``. ``cluster``: name of the cluster that contains it. ``source``: its
    place in the user's model, as submodule, file and line; "" if unknown.
    """

    name: str
    kind: str
    cluster: str | None = None
    inputs: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class InputReport:
    """One tensor argument of one sample, with enough facts to make another that the model accepts.

    ``low`` and ``high`` are the smallest and largest value (indices between them are legal); ``None`` if
    there is none: no elements, or NaN.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None


def nodes_from(data: Iterable[Mapping[str, Any]]) -> tuple[NodeReport, ...]:
    """Node reports from JSON."""
    return tuple(NodeReport(**{**one, "inputs": tuple(one["inputs"])}) for one in data)


def inputs_from(data: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[tuple[InputReport, ...], ...]:
    """Input reports from JSON: the arguments of each sample."""
    return tuple(
        tuple(InputReport(**{**one, "shape": tuple(one["shape"])}) for one in sample)
        for sample in data
    )

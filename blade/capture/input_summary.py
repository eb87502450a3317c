# SPDX-License-Identifier: Apache-2.0
"""Summary of the samples for the report, so that a saved file can be run again without them."""

from collections.abc import Sequence
from typing import Any

import torch

from blade.core.dtypes import COMPUTED
from blade.report.graph import InputReport


def summarize_inputs(
    names: Sequence[str], samples: Sequence[tuple[Any, ...]]
) -> tuple[tuple[InputReport, ...], ...]:
    """Return every argument of every sample; nothing if one of them is more than a tensor.

    ``names`` are those of the graph's inputs, in the order of a sample's entries; the numbers that torch.jit
    appends to keep its names apart ("mask.1") are dropped.
    """
    if not all(isinstance(entry, torch.Tensor) for sample in samples for entry in sample):
        return ()
    return tuple(
        tuple(_describe(name, tensor) for name, tensor in zip(names, sample, strict=True))
        for sample in samples
    )


def _describe(name: str, tensor: torch.Tensor) -> InputReport:
    dtype = str(tensor.dtype).removeprefix("torch.")
    low, high = _range(tensor)
    return InputReport(name.partition(".")[0], dtype, tuple(tensor.shape), low, high)


def _range(tensor: torch.Tensor) -> tuple[float | None, float | None]:
    if not tensor.numel() or tensor.is_complex():
        return None, None
    plain = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    if plain.dtype not in COMPUTED:
        plain = plain.to(torch.float64)
    values = plain[torch.isfinite(plain)] if plain.is_floating_point() else plain
    if not values.numel():
        return None, None
    low, high = torch.aminmax(values)
    return float(low), float(high)

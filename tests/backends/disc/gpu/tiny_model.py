# SPDX-License-Identifier: Apache-2.0
"""What a tiny model is; the benchmarks' folder becomes importable."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import blade

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from zoo.model import Shape, Tensors

LENGTHS = ((2, 6), (1, 1), (3, 1), (1, 37), (5, 13))
SIZES = ((2, 32, 32), (1, 35, 33), (3, 32, 47), (1, 64, 37), (2, 33, 32))
WORDS = 50


@dataclass(frozen=True)
class Tiny:
    """``inputs(shape, seed)``: floats are float32."""

    module: nn.Module
    inputs: Callable[[Shape, int], Tensors]
    shapes: tuple[Shape, ...]
    config: blade.Config = field(default_factory=blade.Config)


def in_dtype(made: Tiny, name: str, shapes: Sequence[Shape]) -> tuple[nn.Module, list[Tensors]]:
    """The module and inputs in ``name``: "fp16", "bf16" or "fp32"."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    given = [made.inputs(shape, seed) for seed, shape in enumerate(shapes)]
    samples = [tuple(t.to(dtype) if t.is_floating_point() else t for t in one) for one in given]
    return made.module.to(dtype), samples

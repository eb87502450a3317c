# SPDX-License-Identifier: Apache-2.0
"""A clock for tests of timing: time passes only where a function says so."""

from collections.abc import Callable
from itertools import count

import torch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def costs(self, *seconds: float) -> Callable[..., None]:
        """A function whose calls take these times in turn, over and over."""
        calls = count()

        def fn(*inputs: torch.Tensor) -> None:
            self.now += seconds[next(calls) % len(seconds)]

        return fn

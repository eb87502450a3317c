# SPDX-License-Identifier: Apache-2.0
"""Measured seconds of every instruction of a DISC engine.

texts, seconds = profile(engine, inputs)      # "kernel gemm_f32 10 12 ..", 1.2e-4
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from blade.timing.decision import MIN_ROUNDS
from blade.timing.interleaved import repeats_for, rest

LONG_S = 0.05  # seconds; a longer call is measured once
FEW_ROUNDS = 3
MIDDLING_S = 0.01  # seconds; a longer call needs no untimed one before it, and fewer rounds


def profile(
    engine: Any, inputs: Sequence[Any], long_s: float = LONG_S
) -> tuple[list[str], list[float]]:
    """Return the instructions and their median seconds; each round rests and, of short calls, runs once untimed."""
    with torch.no_grad():
        texts, once = engine.profile(list(inputs), 1)
        if sum(once) > long_s:
            return texts, once
        rounds, is_short = [], sum(once) < MIDDLING_S
        for _ in range(MIN_ROUNDS if is_short else FEW_ROUNDS):
            rest()
            if is_short:
                engine.profile(list(inputs), 1)
            rounds.append(engine.profile(list(inputs), repeats_for(sum(once)))[1])
    return texts, [median(every) for every in zip(*rounds, strict=True)]

# SPDX-License-Identifier: Apache-2.0
"""Time of a DISC engine per kernel, in ms, measured at a cluster's samples.

    kernel_times(engine, extracted.samples)[0]      # KernelTime("gemm_f32", 24, (1.3, 9.8))

Instructions are timed one by one, so that their sum is a little more than the time of a call.
"""

from collections.abc import Sequence
from typing import cast

import torch

from blade.capture.reference_model import copy_of
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.graph.torchscript.boundary_samples import Inputs
from blade.process.timing_lock import TIMING_LOCK
from blade.report import KernelTime
from blade.report.layer_notes import kernel_ops_of
from blade.runtime.engine import Engine, renew
from blade.timing.instruction_profile import profile

MOST_SAMPLES = 4
_NAMED = ("kernel", "launch", "call")


def kernel_times(engine: torch.ScriptObject, samples: Sequence[Inputs]) -> tuple[KernelTime, ...]:
    """Return the longest first, by the last sample; empty for an engine without a DISC program."""
    program = cast(Engine, engine).program()
    if not any(line.startswith(_NAMED) for line in program.splitlines()):
        return ()
    found = attempt(Stage.SELECT, None, "profile", lambda: _measured(engine, program, samples))
    renew(engine)
    return () if isinstance(found, Reason) else found


def _measured(
    engine: torch.ScriptObject, program: str, samples: Sequence[Inputs]
) -> tuple[KernelTime, ...]:
    calls: dict[str, int] = {}
    seconds: list[dict[str, float]] = []
    for sample in samples[:MOST_SAMPLES]:
        with TIMING_LOCK.timing():
            texts, taken = profile(engine, copy_of(sample))
        here: dict[str, float] = {}
        for text, spent in zip(texts, taken, strict=True):
            here[_name(text)] = here.get(_name(text), 0.0) + spent
        calls = {name: sum(_name(text) == name for text in texts) for name in here}
        seconds.append(here)
    ops = kernel_ops_of(program)
    rows = [
        KernelTime(name, n, tuple(1e3 * one[name] for one in seconds), ops.get(name, ""))
        for name, n in calls.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.ms[-1]))


def _name(instruction: str) -> str:
    """Return ``gemm_f32`` for ``kernel gemm_f32 10 12 ..``, with or without a condition (``when R``)."""
    words = instruction.split()
    words = words[2:] if words[0] == "when" else words
    return words[1] if words[0] in _NAMED else words[0]

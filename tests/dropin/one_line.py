# SPDX-License-Identifier: Apache-2.0
"""Check a program of ``benchmarks/drop_in`` before and after its one line, in a tiny size."""

import sys
from pathlib import Path
from typing import Any

import torch

import blade
from blade.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from drop_in.pipelines import bert
from drop_in.program import TINY, Different, Program, difference, minilm_folder, texts
from drop_in.table import PROGRAMS

__all__ = [
    "QUICK",
    "TINY",
    "Different",
    "bert",
    "check",
    "difference",
    "made",
    "minilm_folder",
    "texts",
]

QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)
TOLERANCE = 1e-5  # of the largest value: sums of float32 in another order
CALLS = 3  # of an input, so that its kinds of calls are optimized


def made(name: str) -> Program:
    """The program, with the same weights each time."""
    torch.manual_seed(0)
    return PROGRAMS[name].make(TINY)


def check(name: str, turns: int = 1, inputs: int = 3, whole: bool = False) -> None:
    """Assert that the program gives its outputs while and after its calls are optimized, and that optimized modules
    answer in the end, all calls.

    ``turns`` is how often calls are optimized: once for the first kind, and once more for those that follow it.
    ``whole``: the line that changes is that of the pipeline.
    """
    original, program = made(name), made(name)
    expected = [original.run(k) for k in range(inputs)]
    if whole:
        assert program.whole is not None
        changed = [program.whole(lambda pipe: blade.accelerate(pipe, config=QUICK))]
    else:
        changed = program.change(lambda module: blade.accelerate(module, config=QUICK))
    for _ in range(turns):
        for _ in range(CALLS):
            for k, output in enumerate(expected):
                assert difference(program.run(k), output) < TOLERANCE
        assert all(blade.wait(one, 300) for one in changed)
    before = [_calls(one) for one in changed]
    for k, output in enumerate(expected):
        assert difference(program.run(k), output) < TOLERANCE
    for one, (answered, left) in zip(changed, before):
        assert _calls(one)[1] == left, blade.report(one).reasons
        assert _calls(one)[0] > answered


def _calls(changed: Any) -> tuple[int, int]:
    """How many calls optimized modules answered, and how many the model, or all parts of a pipeline."""
    counts = {key.split(": ")[-1]: 0 for key in blade.stats(changed)}
    for key, one in blade.stats(changed).items():
        counts[key.split(": ")[-1]] += one.get("calls", 0)
    answered = sum(n for key, n in counts.items() if key.startswith("call "))
    return answered, counts["original"]

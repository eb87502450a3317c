# SPDX-License-Identifier: Apache-2.0
"""Check a program of ``benchmarks/programs`` before and after its one line, in a tiny size."""

import sys
from pathlib import Path

import torch

import blade
from blade.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from programs.program import TINY, Program, difference, minilm_folder, texts
from programs.table import PROGRAMS

__all__ = ["QUICK", "check", "difference", "made", "minilm_folder", "texts"]

QUICK = Config(optimization_pipeline="disc", timing=False)
TOLERANCE = 1e-5  # of the largest value: sums of float32 in another order
CALLS = 3  # of an input, so that its kinds of calls are optimized


def made(name: str) -> Program:
    """The program, with the same weights each time."""
    torch.manual_seed(0)
    return PROGRAMS[name].make(TINY)


def check(name: str, turns: int = 1, inputs: int = 3) -> None:
    """Assert that the program gives its outputs while and after its calls are optimized, and that optimized modules
    answer in the end, all calls.

    ``turns`` is how often calls are optimized: once for the first kind, and once more for those that follow it.
    """
    original, program = made(name), made(name)
    expected = [original.run(k) for k in range(inputs)]
    modules = program.change(lambda module: blade.accelerate(module, config=QUICK))
    for _ in range(turns):
        for _ in range(CALLS):
            for k, output in enumerate(expected):
                assert difference(program.run(k), output) < TOLERANCE
        assert all(blade.wait(module, 300) for module in modules)
    before = [blade.stats(module) for module in modules]
    for k, output in enumerate(expected):
        assert difference(program.run(k), output) < TOLERANCE
    for module, counts in zip(modules, before):
        now = blade.stats(module)
        assert now["original"] == counts["original"], blade.report(module).reasons
        assert now["call 1"]["calls"] > counts["call 1"]["calls"]

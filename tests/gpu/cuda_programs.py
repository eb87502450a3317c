# SPDX-License-Identifier: Apache-2.0
"""Programs for a CUDA device, written by hand, with kernels of a few lines."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from cubins import architecture, container
from programs import Writer

BLOCK = 128


def writer() -> Writer:
    return Writer(isa=f"cuda {architecture()}")


def vectors(w: Writer, count: int) -> tuple[list[int], int, list[int]]:
    """Slots of ``count`` float vectors of one size, the register of that size, and a grid over it."""
    inputs = [w.input("f32", 1, "cuda") for _ in range(count)]
    (n,) = w.dims(inputs[0], 1)
    for other in inputs[1:]:
        w.guard(w.reg(f"eq {n} {w.reg(f'dim {other} 0')}"), "equal sizes")
    one, block = w.const(1), w.const(BLOCK)
    blocks = w.reg(f"floordiv {w.reg(f'add {n} {w.const(BLOCK - 1)}')} {block}")
    return [w.slot(f"input {x}") for x in inputs], n, [blocks, one, one]


def two_step() -> Writer:
    """-(x + y), through the arena."""
    w = writer()
    (a, b), n, grid = vectors(w, 2)
    h, out = w.tensor("arena", [n]), w.tensor("output", [n])
    w.launch("add", grid, [a, b, h], [n])
    w.launch("neg", grid, [h, out], [n])
    w.outputs = [out]
    return w


def graphed(w: Writer, **limits: int):
    """With graphs although the programs are so short that these do not pay."""
    return w.engine(object=container(), limits={"cuda_graphs": 2, **limits})


def plain(w: Writer, constants=(), **limits: int):
    return w.engine(constants, object=container(), limits={"cuda_graphs": 0, **limits})


def run(engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    return outputs


def randn(*sizes: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*sizes, device=device)

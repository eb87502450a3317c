# SPDX-License-Identifier: Apache-2.0
"""What an engine call costs beside the work: guard, dispatch, frame look-up, output list.

    python benchmarks/bench_overhead.py [--repeats 20000] [--rounds 7]

One JSON line per case; ``us`` is the median over rounds of the mean microseconds of one call made in
a TorchScript loop (no Python in it), ``over_us`` what is left after the same loop without the engine.
"""

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn

from blade.runtime.engine import make_engine


class Loop(nn.Module):
    """Calls the engine ``n`` times."""

    def __init__(self, engine: torch.ScriptObject) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, inputs: list[torch.Tensor], n: int) -> int:
        answered = 0
        for _ in range(n):
            outs = self.engine.try_execute(inputs)
            if outs is not None:
                answered += 1
        return answered


class Empty(nn.Module):
    """The same loop around an op that does next to nothing."""

    def forward(self, inputs: list[torch.Tensor], n: int) -> int:
        answered = 0
        for _ in range(n):
            if len(inputs) > 0:
                answered += 1
        return answered


def program(inputs: int, relu: bool) -> str:
    """Returns its first input, or its relu; ``inputs`` float matrices, three guards."""
    lines = ["blade.disc 1", "isa", f"inputs {inputs}"]
    lines += [f"input {i} f32 cpu 2" for i in range(inputs)]
    lines += ["registers 3", "reg 0 dim 0 0", "reg 1 dim 0 1", "reg 2 const 1", "guards 3"]
    lines += ["guard 2 always"] * 3
    lines += [f"slots {inputs + relu}"] + [f"slot {i} input {i}" for i in range(inputs)]
    lines += [f"slot {inputs} output f32 2 0 1"] * relu + [f"instructions {int(relu)}"]
    if relu:
        lines += [f"call aten::relu.out 2 t:0 t:{inputs} 0"]
    lines += [f"outputs 1 {inputs if relu else 0}", "end"]
    return "\n".join(lines)


def seconds_per_call(module: nn.Module, inputs: list[torch.Tensor], repeats: int) -> float:
    start = time.perf_counter()
    module(inputs, repeats)
    return (time.perf_counter() - start) / repeats


def measure(case: str, inputs: int, relu: bool, arguments: argparse.Namespace) -> None:
    engine = make_engine(case, "disc", program(inputs, relu), b"")
    loop, empty = torch.jit.script(Loop(engine)), torch.jit.script(Empty())
    tensors = [torch.randn(4, 8) for _ in range(inputs)]
    assert loop(tensors, 100) == 100, engine.last_error()
    rounds = [
        (
            seconds_per_call(loop, tensors, arguments.repeats),
            seconds_per_call(empty, tensors, arguments.repeats),
        )
        for _ in range(arguments.rounds)
    ]
    call = statistics.median(a for a, _ in rounds)
    over = statistics.median(a - b for a, b in rounds)
    line = {"case": case, "us": round(call * 1e6, 3), "over_us": round(over * 1e6, 3)}
    line |= {"repeats": arguments.repeats, "torch": torch.__version__, "cpu": platform.machine()}
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for inputs in (1, 4, 8):
        measure(f"identity_{inputs}_inputs", inputs, False, arguments)
    measure("relu_1_input", 1, True, arguments)


if __name__ == "__main__":
    main()

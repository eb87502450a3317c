# SPDX-License-Identifier: Apache-2.0
"""The files that the fuzz target mutates, one of each kind, and inputs that their engines take.

    python tests/fuzz/seeds.py FOLDER

Writes ``NAME.pt``, a module whose forward gives its inputs to every engine, and ``NAME.inputs``, a list of tensors.
The programs are DISC's in fp32 and int8, of a convolution net and of attention; ``calls`` has an engine without native
code that uses every kind of slot, and one of a runner called ``echo``, which the fuzz target itself implements.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import blade
from blade.runtime.engine import make_engine, make_pending, register_runner

ECHO = """blade.disc 1
isa
inputs 1
input 0 f32 cpu 2
registers 2
reg 0 dim 0 0
reg 1 dim 0 1
guards 0
slots 1
slot 0 output f32 2 0 1
instructions 0
outputs 1 0
end
"""


class Attention(nn.Module):
    """One block of a transformer."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, words, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, words, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(attended.transpose(1, 2).reshape(batch, words, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Engines(nn.Module):
    """Engines that take the same inputs."""

    def __init__(self, engines: list[torch.ScriptObject], weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.calls, self.echo, self.pending = engines

    def forward(self, x: torch.Tensor) -> int:
        answered = 0
        for outputs in (
            self.calls.try_execute([x]),
            self.echo.try_execute([x]),
            self.pending.try_execute([x]),
        ):
            if outputs is not None:
                answered += 1
        return answered


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).eval()


def disc() -> tuple[torch.jit.ScriptModule, list[torch.Tensor]]:
    x = torch.randn(4, 16)
    return optimized(mlp(), x), [x]


def int8() -> tuple[torch.jit.ScriptModule, list[torch.Tensor]]:
    x = torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    fields = {"enable_int8": True, "optimization_pipeline": "quant"}
    return optimized(model, x, **fields), [x]


def convolution() -> tuple[torch.jit.ScriptModule, list[torch.Tensor]]:
    x = torch.randn(2, 3, 12, 12)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4)).eval()
    return optimized(model, x), [x]


def attention() -> tuple[torch.jit.ScriptModule, list[torch.Tensor]]:
    x = torch.randn(2, 7, 32)
    return optimized(Attention().eval(), x), [x]


def calls() -> tuple[torch.jit.ScriptModule, list[torch.Tensor]]:
    """The program of ``tests/runtime/test_mangled.py``, an engine of a runner, and a pending one."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
    from test_mangled import calls_program

    program, constants = calls_program()
    x = torch.randn(3, 4)
    register_runner("echo", lambda *loaded: lambda inputs: [t.clone() for t in inputs])
    engines = [
        make_engine("calls", "disc", program.text(), b"", constants),
        make_engine("echo", "echo", ECHO, b"a payload", constants, {"max_failures": 5}),
        make_pending("pending"),
    ]
    module = torch.jit.script(Engines(engines, constants[0]).eval())
    assert module(x) == 2, [engine.stats() for engine in engines]
    return module, [x]


def optimized(model: nn.Module, x: torch.Tensor, **fields: object) -> torch.jit.ScriptModule:
    """One engine answers for the whole of ``model``: the module's inputs are the engine's."""
    config = blade.Config(**{"optimization_pipeline": "disc", "timing": False, **fields})
    module = blade.optimize(model, x, config)
    (engine,) = [part.engine for part in module.modules() if hasattr(part, "engine")]
    assert engine.try_execute([x]) is not None, (blade.report(module), engine.stats())
    return module


KINDS: dict[str, Callable[[], tuple[torch.jit.ScriptModule, list[torch.Tensor]]]] = {
    "disc": disc,
    "int8": int8,
    "convolution": convolution,
    "attention": attention,
    "calls": calls,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["BLADE_CACHE_DIR"] = str(folder / "cache")
    for name, make in KINDS.items():
        torch.manual_seed(0)
        module, inputs = make()
        torch.jit.save(module, str(folder / f"{name}.pt"))
        torch.save(inputs, folder / f"{name}.inputs")
        print(f"{name}: {(folder / f'{name}.pt').stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""An engine made for one CUDA device, asked with something else: the original answers, and the counters say why."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from entrances import CONFIG
from torch import nn

import blade
from blade.core.reason import Code
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


class Chain(nn.Module):
    """No weights: it has an answer on every device."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * y + 1) - torch.sigmoid(x)


def optimized(device: str = "cuda") -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    given = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    made = blade.optimize(Chain().eval(), given, CONFIG)
    assert [c.backend for c in blade.report(made).clusters] == ["disc"]
    return made


def counters(module: nn.Module) -> dict[str, int]:
    [found] = blade.stats(module).values()
    return found


def answers(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    got = module(x, y)
    want = Chain()(x, y)
    assert got.device == want.device
    torch.testing.assert_close(got, want)


def test_cpu_tensors_run_the_original() -> None:
    module = optimized()
    answers(module, torch.randn(3, 8), torch.randn(3, 8))
    assert counters(module)[Code.GUARD_DEVICE.value] == 1
    answers(module, torch.randn(5, 8).cuda(), torch.randn(5, 8).cuda())
    assert counters(module)["engine_runs"] == 1


def test_a_number_of_the_cpu_among_cuda_tensors_runs_the_original() -> None:
    """Eager takes a tensor without dimensions from the CPU."""
    module = optimized()
    answers(module, torch.randn(3, 8).cuda(), torch.tensor(0.7))
    assert counters(module).get("engine_runs", 0) == 0


def test_cuda_tensors_do_not_reach_an_engine_of_the_cpu() -> None:
    pytest.importorskip("torch_mlir", reason="DISC compiles for CPUs with torch-mlir")
    module = optimized("cpu")
    answers(module, torch.randn(3, 8).cuda(), torch.randn(3, 8).cuda())
    assert counters(module)[Code.GUARD_DEVICE.value] == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device, or none")
def test_another_device() -> None:
    """An engine without constants serves where its inputs are; tensors of two devices are as in eager."""
    module = optimized("cuda:0")
    answers(module, *torch.randn(2, 3, 8, device="cuda:1"))
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 8, device="cuda:0"), torch.randn(3, 8, device="cuda:1"))
    answers(module, *torch.randn(2, 3, 8, device="cuda:0"))


def test_code_for_another_architecture_runs_the_original() -> None:
    """As a file has it that was made on another kind of GPU: the program and the code name that one."""
    module = optimized()
    engine = module.cluster_0.engine
    state = engine._get_method("__getstate__")()
    program, code = state[1][2], bytes(state[3][0].tolist())
    [own] = set(re.findall(r"\bsm_\d+\b", program))
    kernels = int(code.split(b"\n")[1])  # a line for each names its architecture
    other = make_engine(
        "cluster_0",
        "disc",
        program.replace(own, "sm_10"),
        code.replace(f"{own} ".encode(), b"sm_10 ", kernels),
    )
    engine._get_method("__setstate__")(other._get_method("__getstate__")())
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    answers(loaded, *torch.randn(2, 3, 8, device="cuda"))
    assert counters(loaded).get("engine_runs", 0) == 0
    assert counters(loaded)[Code.DEVICE_MISMATCH.value] == 1


def test_a_file_for_cuda_serves_in_another_process(tmp_path: Path) -> None:
    """Without Triton: what it needs is in the file."""
    path = tmp_path / "model.pt"
    torch.jit.save(optimized(), path)
    code = f"""
import sys
sys.modules["triton"] = None
import torch, blade
module = torch.jit.load({str(path)!r})
x, y = torch.randn(2, 9, 8, device="cuda")
for _ in range(4):
    torch.testing.assert_close(module(x, y), torch.tanh(x * y + 1) - torch.sigmoid(x))
[found] = blade.stats(module).values()
assert found["engine_runs"] == 4, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

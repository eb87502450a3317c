# SPDX-License-Identifier: Apache-2.0
"""AOTInductor and TVM: ops, sizes, files, threads, and what happens where their library is missing.

A compilation takes seconds, so one engine serves many tests and one model holds many ops.
"""

import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

import blade
from blade.backends.inductor import run as inductor_run
from blade.backends.shared.host_isa import instructions
from blade.runtime.engine import isa_features

pytestmark = pytest.mark.needs("runtime")
NATIVE = [
    pytest.param("inductor", marks=pytest.mark.needs("g++")),
    pytest.param("tvm", marks=pytest.mark.needs("g++", "tvm")),
]
WIDTH = 512


class Encoder(nn.Module):
    """Linear layers, an activation, a norm, attention under a mask, and a buffer of numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("positions", torch.randn(128, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = x + self.positions[: x.shape[1]]
        h = self.norm(h + self.down(torch.nn.functional.gelu(self.up(h))))
        scores = h @ h.transpose(1, 2) / 8
        return scores.masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1) @ h


@cache
def original() -> nn.Module:
    return Encoder().eval()


def example(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * batch + length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, length // 2 + 1 :] = 0
    return torch.randn(batch, length, 64, generator=rng), mask


@pytest.fixture(scope="module")
def optimized(request: pytest.FixtureRequest) -> torch.jit.ScriptModule:
    config = blade.Config(
        optimization_pipeline=request.param, timing=False, cache=False, strict=True
    )
    made = blade.optimize(original(), [example(2, 9), example(3, 16)], config)
    [cluster] = blade.report(made).clusters
    assert cluster.backend == request.param
    return made


def save(module: torch.jit.ScriptModule) -> bytes:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def check(module: torch.nn.Module, *sizes: tuple[int, int]) -> None:
    with torch.no_grad():
        for size in sizes:
            torch.testing.assert_close(module(*example(*size)), original()(*example(*size)))


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_sizes_it_has_not_seen(optimized: torch.jit.ScriptModule) -> None:
    [before] = blade.stats(optimized).values()
    check(optimized, (1, 7), (4, 33), (2, 128))
    [after] = blade.stats(optimized).values()
    assert after["engine_runs"] == before["engine_runs"] + 3
    check(optimized, (1, 1), (5, 1))


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_nothing_at_all(optimized: torch.jit.ScriptModule) -> None:
    check(optimized, (0, 5), (3, 0), (0, 0))
    strided = example(6, 8)[0][::2], example(3, 8)[1]
    torch.testing.assert_close(optimized(*strided), original()(*strided))


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_a_file_has_every_weight_once_and_serves_elsewhere(
    optimized: torch.jit.ScriptModule, tmp_path: Path
) -> None:
    data = save(optimized)
    weights = sum(t.nbytes for t in original().state_dict().values())
    assert weights < len(data) < weights + 150_000
    (tmp_path / "model.pt").write_bytes(data)
    torch.save([(e := example(3, 21)), original()(*e)], tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "served 1, imported False" in done.stdout


IN_A_FRESH_PROCESS = """
import os, sys, tempfile
import torch, blade
tempfile.tempdir = folder = sys.argv[1]
module = torch.jit.load(folder + "/model.pt")
inputs, expected = torch.load(folder + "/expected.pt")
with torch.no_grad():
    torch.testing.assert_close(module(*inputs), expected)
[counted] = blade.stats(module).values()
compilers = {"torch._inductor.lowering", "tvm"} & set(sys.modules)
print(f"served {counted['engine_runs']}, imported {bool(compilers)}")
assert sorted(os.listdir(folder)) == ["expected.pt", "model.pt"], "unpacked files are left behind"
"""


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_many_threads_at_once(optimized: torch.jit.ScriptModule) -> None:
    loaded = torch.jit.load(io.BytesIO(save(optimized)))
    sizes = [(1 + i % 3, 2 + i % 11) for i in range(48)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda size: check(loaded, size), sizes))
    [counted] = blade.stats(loaded).values()
    assert counted["engine_runs"] == counted["calls"] == len(sizes)


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_a_weight_written_in_place_is_seen_or_the_original_runs(
    optimized: torch.jit.ScriptModule,
) -> None:
    loaded = torch.jit.load(io.BytesIO(save(optimized)))
    check(loaded, (2, 5))
    changed = Encoder().eval()
    with torch.no_grad():
        for tensor in [*loaded.buffers(), *loaded.parameters()]:
            if tensor.is_floating_point() and tensor.dim() == 1 and tensor.numel() == WIDTH:
                tensor.add_(1)
        changed.up.bias.add_(1)
        torch.testing.assert_close(loaded(*example(2, 5)), changed(*example(2, 5)))


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_the_file_says_which_instructions_its_code_may_use(
    optimized: torch.jit.ScriptModule,
) -> None:
    [engine] = [child.engine for child in optimized.children() if hasattr(child, "engine")]
    _, isa, *_ = engine.program().splitlines()
    assert isa.split() == ["isa", *instructions()]
    vectors = {f for f in isa_features() if f.startswith(("sse4_", "avx", "fma", "f16c", "amx"))}
    assert vectors <= set(isa.split())


@pytest.mark.parametrize("optimized", NATIVE, indirect=True)
def test_another_version_runs_the_original(
    optimized: torch.jit.ScriptModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save(optimized)
    for module in ("inductor.package._stamp", "tvm.run.stamp"):
        monkeypatch.setattr(f"blade.backends.{module}", lambda: {"torch": "0", "apache-tvm": "0"})
    loaded = torch.jit.load(io.BytesIO(data))
    check(loaded, (2, 5))
    [counted] = blade.stats(loaded).values()
    assert counted["backend_unavailable"] == 1 and counted["engine_runs"] == 0


def _as_in_a_fake_kernel() -> Any:
    """What FakeTensorMode does around each op: tensors on the CPU dispatch to Meta."""
    return in_kernel_invocation_manager(FakeTensorMode())


@pytest.mark.parametrize("mode", [FakeTensorMode, _as_in_a_fake_kernel])
def test_weights_are_let_go_while_tensors_are_fake(mode: Callable[[], Any]) -> None:
    """The garbage collector frees an engine wherever it likes, as in the export of the next model."""
    plain, packed = torch.rand(64, 64), torch.rand(64, 64).to_mkldnn()
    given = [(one, inductor_run._nothing(one)) for one in (plain, packed)]
    with mode():
        inductor_run._let_go(given)
    for tensor in (plain, packed):
        assert tensor.numel() == 1 and tensor.device.type == "cpu"
        assert not isinstance(tensor.data, FakeTensor)

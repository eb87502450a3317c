# SPDX-License-Identifier: Apache-2.0
"""Backends that hand ONNX to a library: files, other sizes and dtypes, threads, and everything that breaks."""

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.backends.shared.library_sessions import OptionalLibrary
from blade.core.reason import Code
from blade.fallback.isolated_convert import close_workers

pytestmark = pytest.mark.needs("runtime")
NAMES = ("onnxruntime", "openvino")
BACKENDS = [pytest.param(name, marks=pytest.mark.needs(name)) for name in NAMES]


class Block(nn.Module):
    """Attention and a feed-forward part: large weights, sizes in the arithmetic, a result that is permuted."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (split.permute(2, 0, 3, 1, 4)[i] for i in range(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        hidden = self.norm(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.wide(hidden), torch.tanh(hidden).transpose(1, 2)


def sample(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(batch + length))


@pytest.fixture(scope="module", params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def optimized(name: str) -> torch.jit.ScriptModule:
    config = blade.Config(optimization_pipeline=name, timing=False, strict=True)
    return blade.optimize(Block().eval(), [sample(2, 5), sample(3, 8)], config)


@pytest.fixture(scope="module")
def saved(optimized: torch.jit.ScriptModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "model.pt"
    torch.jit.save(optimized, path)
    return path


def runs(module: torch.jit.ScriptModule) -> int:
    return sum(counters["engine_runs"] for counters in blade.stats(module).values())


def check(module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        got, want = module(x), Block().eval()(x)
    torch.testing.assert_close(tuple(got), want, rtol=1e-4, atol=1e-5)
    if min(x.shape) > 1:
        assert [t.stride() for t in got] == [t.stride() for t in want]


def test_one_engine_serves_sizes_never_seen(name: str, optimized: torch.jit.ScriptModule) -> None:
    assert {c.backend for c in blade.report(optimized).clusters} == {name}
    before, sizes = runs(optimized), [(2, 5), (1, 1), (4, 31), (7, 2), (1, 64)]
    for size in sizes:
        check(optimized, sample(*size))
    assert runs(optimized) - before == len(sizes) * len(blade.stats(optimized))


def test_empty_inputs_run_the_original(optimized: torch.jit.ScriptModule) -> None:
    before = runs(optimized)
    got, _ = optimized(torch.randn(0, 5, 64))
    assert got.shape == (0, 5, 64) and runs(optimized) == before


def test_strided_inputs_are_read_as_they_are_meant(optimized: torch.jit.ScriptModule) -> None:
    check(optimized, sample(3, 8).transpose(0, 1).contiguous().transpose(0, 1))
    check(optimized, torch.cat([sample(3, 8), sample(3, 8)], -1)[..., 32:96])


def test_answers_outlive_the_next_call(optimized: torch.jit.ScriptModule) -> None:
    first, _ = optimized(sample(2, 5))
    kept = first.clone()
    optimized(sample(2, 5) + 1)
    assert torch.equal(first, kept)


def test_several_threads_at_once(optimized: torch.jit.ScriptModule) -> None:
    inputs = [sample(1 + i % 3, 1 + i % 7) for i in range(24)]
    want = [optimized(x)[0] for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            got = list(pool.map(lambda x: optimized(x)[0], inputs))
            assert all(map(torch.allclose, got, want))


IN_A_FRESH_PROCESS = """
import sys, torch, blade
module = torch.jit.load(sys.argv[1])
x, want = torch.load(sys.argv[2])
torch.testing.assert_close(tuple(module(x)), tuple(want), rtol=1e-5, atol=1e-6)
assert all(c["engine_runs"] == 1 and c["fallbacks"] == 0 for c in blade.stats(module).values())
assert "onnxscript" not in sys.modules, "running needs no exporter"
"""


def test_the_file_runs_in_a_fresh_process_and_has_weights_once(
    saved: Path, optimized: torch.jit.ScriptModule
) -> None:
    x = sample(5, 6)
    with torch.no_grad():
        torch.save((x, tuple(optimized(x))), saved.with_name("case.pt"))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(saved), str(saved.with_name("case.pt"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = sum(p.numel() * 4 for p in Block().parameters())
    assert saved.stat().st_size < weights + 120_000  # a second copy would be 130,000 more


def test_weights_written_in_place_are_seen(saved: Path) -> None:
    module = torch.jit.load(saved)
    check(module, sample(2, 5))
    buffers = {b.data_ptr(): b for _, b in module.named_buffers() if b.shape == (64, 64)}
    [weight] = buffers.values()
    kept = weight.clone()
    weight.zero_()
    with torch.no_grad():
        zeroed = Block().eval()
        zeroed.out.weight.zero_()
        torch.testing.assert_close(
            module(sample(2, 5))[0], zeroed(sample(2, 5))[0], rtol=1e-4, atol=1e-5
        )
    assert not torch.equal(kept, weight) and runs(module) == 2 * len(blade.stats(module))


def reloaded(saved: Path) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(saved.read_bytes()))


def test_without_the_library_a_file_runs_the_original(
    name: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    module = reloaded(saved)
    check(module, sample(2, 5))
    assert all(c["backend_unavailable"] == 1 for c in blade.stats(module).values())
    with pytest.raises(blade.BackendError, match=f"{name} is not installed: pip install {name}"):
        blade.optimize(Block().eval(), sample(2, 5), blade.Config(optimization_pipeline=name))


def test_with_another_version_a_file_runs_the_original(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OptionalLibrary, "installed", lambda self: "0.1")
    module = reloaded(saved)
    check(module, sample(2, 5))
    assert all(c["backend_unavailable"] == 1 for c in blade.stats(module).values())


@pytest.fixture
def worker_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In processes that convert from now on, importing ``package`` runs ``code``."""

    def replace(package: str, code: str) -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        close_workers()

    yield replace
    close_workers()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('libmissing.so: cannot open shared object file')", Code.CONVERSION_FAILED),
        ("import os; os.abort()", Code.CONVERSION_CRASHED),
    ],
)
def test_a_broken_converter_costs_a_reason(
    name: str, worker_without: Any, code: str, reason: Code
) -> None:
    worker_without("onnxscript", code)
    config = blade.Config(optimization_pipeline=name, timing=False, cache=False)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Softmax(-1)).eval()
    optimized = blade.optimize(model, sample(2, 5), config)
    torch.testing.assert_close(optimized(sample(3, 4)), model(sample(3, 4)))
    reasons = [r for c in blade.report(optimized).clusters for r in c.reasons]
    assert reason in [r.code for r in (*reasons, *blade.report(optimized).reasons)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_precisions_stay_exact(name: str, dtype: torch.dtype) -> None:
    model = Block().eval().to(dtype)
    config = blade.Config(optimization_pipeline=name, timing=False)
    optimized = blade.optimize(model, sample(2, 5).to(dtype), config)
    x = sample(3, 8).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(tuple(optimized(x)), model(x))
    codes = {r.code for r in blade.report(optimized).reasons}
    assert Code.UNSUPPORTED_DTYPE in codes


@pytest.mark.needs("minilm")
def test_minilm(name: str, minilm: nn.Module, minilm_inputs: Any) -> None:
    config = blade.Config(optimization_pipeline=name, timing=False, strict=True)
    optimized = blade.optimize(minilm, [minilm_inputs(1, 16), minilm_inputs(2, 24)], config)
    for batch, length in ((1, 16), (3, 40), (1, 1), (2, 128)):
        inputs = minilm_inputs(batch, length, seed=length)
        with torch.no_grad():
            want, got = minilm(**inputs), optimized(**inputs)
        torch.testing.assert_close(got[0], want.last_hidden_state, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(got[1], want.pooler_output, rtol=1e-4, atol=2e-5)
    served = [c for c in blade.report(optimized).clusters if c.backend == name]
    assert sum(sum(c.ops.values()) for c in served) > 170
    assert all(c["fallbacks"] == 0 for c in blade.stats(optimized).values())

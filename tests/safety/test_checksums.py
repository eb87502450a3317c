# SPDX-License-Identifier: Apache-2.0
"""What a saved engine is, is covered by its checksum: program, code, limits and constants."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash
from fake_backends import produces
from torch import nn

import blade
from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
RECORDS = ("constants/", "data/")
DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 12, 31, 32, 33, 63, 64, 100, 1000, 4099])
def test_the_hash_is_the_librarys(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    want = xxhash.xxh64(bytes(data.numpy())).intdigest()
    assert torch.ops.blade.xxh64(data) % (1 << 64) == want


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()


@pytest.fixture(scope="module", params=["fp32", "int8"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "model.pt"
    fields = {"enable_int8": True, "quantization_type": "weight_only"}
    config = blade.Config(
        optimization_pipeline="quant" if request.param == "int8" else "DISC",
        timing=False,
        **(fields if request.param == "int8" else {}),
    )
    optimized = blade.optimize(small_model(), X, config)
    assert blade.stats(optimized), blade.report(optimized)
    torch.jit.save(optimized, path)
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def write(path: Path, content: dict[str, bytes]) -> None:
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in content.items():
        if name not in ("version", ".data/serialization_id", "byteorder"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def engines(module: torch.jit.ScriptModule):
    return [one.engine for name, one in module.named_children() if name.startswith("cluster")]


@produces(Code.CORRUPT_PAYLOAD)
def test_one_flipped_bit_in_any_tensor(saved: Path, tmp_path: Path, capfd) -> None:
    """Every record of tensor data that an engine reads, in its middle."""
    content = members(saved)
    whole = torch.jit.load(saved)
    storages = [t for engine in engines(whole) for t in engine.__getstate__()[0][3] if t.numel()]
    held = {bytes(t.untyped_storage()) for t in storages}
    names = [n for n, data in content.items() if n.startswith(RECORDS) and data in held]
    assert len(names) >= 2
    for name in names:
        damaged = bytearray(content[name])
        damaged[len(damaged) // 2] ^= 1
        path = tmp_path / "damaged.pt"
        write(path, {**content, name: bytes(damaged)})
        loaded = torch.jit.load(path)
        assert "checksum" in capfd.readouterr().err
        loaded(X)
        counts = [engine.stats().get(Code.CORRUPT_PAYLOAD.value, 0) for engine in engines(loaded)]
        assert sum(counts) >= 1, name


def test_limits_are_covered(saved: Path) -> None:
    engine = engines(torch.jit.load(saved))[0]
    (version, words, numbers, tensors), kind = engine.__getstate__()
    for name in set(numbers) - {"checksum"}:
        other = torch.ScriptObject.__new__(torch.ScriptObject)
        other.__setstate__(((version, words, {**numbers, name: numbers[name] + 1}, tensors), kind))
        assert "checksum" in other.why_unavailable()
    same = torch.ScriptObject.__new__(torch.ScriptObject)
    same.__setstate__(((version, words, numbers, tensors), kind))
    assert same.why_unavailable() == ""


def test_records_that_are_shorter_than_they_claim(saved: Path, tmp_path: Path) -> None:
    """torch believes the sizes in the file; what lies behind the record is not read."""
    content = members(saved)
    for name in [n for n, data in content.items() if n.startswith(RECORDS) and len(data) > 256]:
        path = tmp_path / "short.pt"
        write(path, {**content, name: content[name][:16]})
        script = f"import sys, torch, blade; torch.jit.load({str(path)!r})"
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert ran.returncode == 0, (name, ran.stderr)
        if "is not used" in ran.stderr:
            assert "outside its memory" in ran.stderr or "parts" in ran.stderr, ran.stderr


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_files_of_format_1_are_still_read(kind: str) -> None:
    """Saved by blade before format 2; code for a CPU that this one is not answers by the original."""
    loaded = torch.jit.load(DATA / f"{kind}.pt")
    x, want = torch.load(DATA / f"{kind}.answer")
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind == "fp32" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(loaded(x), want, **tolerance)
    for engine in engines(loaded):
        stats = engine.stats()
        assert stats["engine_runs"] == 1 or stats.get(Code.CPU_MISMATCH.value) == 1, stats

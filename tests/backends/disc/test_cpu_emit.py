# SPDX-License-Identifier: Apache-2.0
"""The emitted text itself (golden), what is emitted about it, the host, and compilation to an object."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_native import pointwise_kernel, symbol
from test_cpu_kernels import gelu, layer_norm, softmax

from blade.backends.disc.cpu.compile.ar_archive import MAGIC
from blade.backends.disc.cpu.compile.parallel import compile_kernels
from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import Kernel
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.errors import Refused

AVX2 = CpuTarget(("avx2", "fma", "f16c"), 8)
GOLDEN = {
    "gelu_1536": gelu(1536),
    "softmax": softmax(),
    "layer_norm_384": layer_norm(384),
    "add_bf16": pointwise_kernel("add", [torch.bfloat16] * 2, torch.bfloat16),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(name: str, update_golden: bool) -> None:
    path = Path(__file__).parent / "golden" / f"{name}.mlir"
    text = emit(GOLDEN[name], name, AVX2).text
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{path.name} differs; --update-golden rewrites it"
    )


def test_extent_cost_and_scratch() -> None:
    s0, s1 = symbol("s0"), symbol("s1")
    emitted = emit(softmax(), "k", AVX2)
    assert emitted.extent == s0
    assert emitted.cost.subs({s1: 10}) >= 10
    assert emitted.scratch == 4 * s1 + 64
    assert emit(layer_norm(384), "k", AVX2).scratch == 384 * 4 + 64


def test_the_main_loop_has_no_mask_and_a_constant_multiple_no_rest() -> None:
    assert "masked" not in emit(layer_norm(384), "k", AVX2).text
    symbolic = emit(layer_norm(symbol("s1")), "k", AVX2).text
    first_loop = symbolic[: symbolic.index("scf.if")]
    assert "masked" in symbolic
    assert "masked" not in first_loop


def test_float16_without_conversion_instructions_is_refused() -> None:
    kernel = pointwise_kernel("add", [torch.float16] * 2, torch.float16)
    with pytest.raises(Refused, match="F16C") as caught:
        emit(kernel, "k", CpuTarget(("sse4_1",), 4))
    assert caught.value.code == "unsupported_dtype"


def test_buffers_of_an_unknown_type_are_refused() -> None:
    kernel: Kernel = pointwise_kernel("add", [torch.float32] * 2, torch.float32)
    args = (replace(kernel.args[0], dtype=torch.complex64), *kernel.args[1:])
    with pytest.raises(Refused, match="complex64"):
        emit(replace(kernel, args=args), "k", AVX2)


def test_host_lanes_fit_its_features() -> None:
    target = host()
    assert target.lanes in (4, 8, 16)
    if target.lanes == 8:
        assert {"avx2", "fma"} <= set(target.isa)
    if target.lanes == 16:
        assert "avx512f" in target.isa


@pytest.mark.needs("torch_mlir")
@pytest.mark.skipif(shutil.which("ld") is None, reason="no linker")
def test_one_archive_holds_every_kernel(tmp_path: Path) -> None:
    kernels = {
        "first": gelu(1536),
        "second": pointwise_kernel("atan2", [torch.float64] * 2, torch.float64),
    }
    data = compile_kernels([(n, emit(k, n, host()).text) for n, k in kernels.items()], host())
    assert data.startswith(MAGIC)
    (tmp_path / "k.a").write_bytes(data)
    library = tmp_path / "k.so"
    command = ["ld", "-shared", "-o", library, "--whole-archive", tmp_path / "k.a", "-lm"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    x, y = torch.randn(2, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(21, dtype=torch.float64)
    pointers = (ctypes.c_void_p * 4)(x.data_ptr(), y.data_ptr(), out.data_ptr(), None)
    ints = (ctypes.c_int64 * 1)(21)
    loaded.second(pointers, ints, ctypes.c_int64(0), ctypes.c_int64(21))
    torch.testing.assert_close(out, torch.atan2(x, y))
    assert loaded.first


@pytest.mark.needs("torch_mlir")
def test_without_kernels_there_is_still_an_object() -> None:
    data = compile_kernels([], host())
    assert data.startswith(MAGIC) and b"\x7fELF" in data


def test_a_row_known_to_be_whole_vectors_has_no_rest() -> None:
    kernel = layer_norm(symbol("s1"))
    assert "masked" in emit(replace(kernel, multiple=4), "k", AVX2).text
    assert "masked" not in emit(replace(kernel, multiple=8), "k", AVX2).text

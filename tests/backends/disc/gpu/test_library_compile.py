# SPDX-License-Identifier: Apache-2.0
"""Library kernels compiled for sm_90, on any machine: tensor cores are used, and registers suffice."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch
from cpu_native import symbol
from test_attention_gpu import L, merged, source
from test_gemm_gpu import fused_with
from test_gpu_compile import accesses, ptx
from test_moments_gpu import made as made_moments

from blade.backends.disc.gpu.attention.calls import attention
from blade.backends.disc.gpu.compile.compile import compile_units
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch
from blade.backends.disc.gpu.gemm.epilogue import group_epilogue, plain_epilogue
from blade.backends.disc.gpu.gemm.product import GemmTile, launch, product_of
from blade.backends.disc.gpu.library.group_moments import moments
from blade.backends.disc.ir.attention import attend
from blade.backends.disc.ir.graph import IrBuilder
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import GpuTarget

pytestmark = pytest.mark.needs("triton")
S = symbol("s1")


def attention_launches(
    depth: int, dtype: torch.dtype, biased: bool, rows: Dim = 1
) -> list[LibraryLaunch]:
    """``rows``: 1 where the bias is one row for all queries."""
    b = IrBuilder()
    x, (q, k, v) = merged(b, 4, depth, dtype)
    m = b.make("input", (), (x.shape[0], 1, rows, L), dtype, index=1)
    bias = b.broadcast(m, (x.shape[0], 4, L, L)) if biased else None
    launches = attention(source(attend(b, q, k, v, bias, 0.125)), GpuTarget(), SizeRelations())
    assert launches is not None
    return launches


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_moments_read_neighbours_at_once(last: bool, tmp_path: Path) -> None:
    _, value = made_moments(64, 8, "channels_last" if last else "contiguous", torch.float16)
    launches = moments(value, GpuTarget(), Counters(64), SizeRelations())
    for line in resources(launches, tmp_path):
        assert "STACK:0" in line and "LOCAL:0" in line, line
    text = ptx(launches[-1].choice.unit, tmp_path)
    assert "atom.global.gpu.acq_rel.add" in text.replace("@%p1 ", "")
    if last:
        assert 16 in accesses(text, "ld")


def product_launch(tile: GemmTile, dtype: torch.dtype) -> LibraryLaunch:
    b = IrBuilder()
    x = b.make("input", (), (S, 768), dtype, index=0)
    w = b.make("const", (), (768, 768), dtype, index=0)
    y = b.make("linear", (x, w), (S, 768), dtype)
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    return launch(product, tile, None, Counters(1), SizeRelations(), early=True)


def resources(launches: list[LibraryLaunch], folder: Path) -> list[str]:
    """What cuobjdump says of registers and memory, for every function."""
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    tool = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    units = [one.choice.unit for one in launches]
    data, lines = compile_units(units, GpuTarget()), []
    _, count, rest = data.split(b"\n", 2)
    sizes = []
    for _ in range(int(count)):
        line, rest = rest.split(b"\n", 1)
        sizes.append(int(line.split()[4]))
    for size in sizes:
        (folder / "x.cubin").write_bytes(rest[:size])
        rest = rest[size:]
        run = subprocess.run(
            [tool, "-res-usage", folder / "x.cubin"], capture_output=True, text=True, check=True
        )
        lines += [line for line in (run.stdout + run.stderr).splitlines() if "REG:" in line]
    assert len(lines) == len({u.name for u in units})
    return lines


@pytest.mark.parametrize("biased", [False, True])
def test_attention_keeps_to_registers_and_tensor_cores(biased: bool, tmp_path: Path) -> None:
    launches = attention_launches(64, torch.float16, biased)
    for line in resources(launches, tmp_path):
        assert "STACK:0" in line and "LOCAL:0" in line, line
    assert "mma.sync" in ptx(launches[0].choice.unit, tmp_path)
    text = ptx(launches[-1].choice.unit, tmp_path)
    assert "wgmma.mma_async" in text
    assert "cp.async.cg.shared.global" in text  # keys and values, 16 bytes at a time


@pytest.mark.parametrize("depth", [80, 96, 128])
def test_two_programs_of_large_tiles_fit_on_a_multiprocessor(depth: int, tmp_path: Path) -> None:
    """By threads and by shared memory; what little spills does so outside of the loop over keys."""
    launches = attention_launches(depth, torch.float16, False)
    [large] = [one for one in launches if one.choice.unit.registers]
    [line] = resources([large], tmp_path)
    registers, stack = (int(re.search(rf"{w}:(\d+)", line)[1]) for w in ("REG", "STACK"))  # type: ignore[index]
    assert registers * 32 * large.choice.unit.warps * 2 <= 65536 and stack <= 64
    head = compile_units([large.choice.unit], GpuTarget()).split(b"\n", 3)[2]
    assert 2 * int(head.split()[3]) < GpuTarget().shared


@pytest.mark.parametrize("depth", [64, 128])
def test_a_bias_for_every_score_fits_into_registers(depth: int, tmp_path: Path) -> None:
    for line in resources(attention_launches(depth, torch.float16, True, L), tmp_path):
        assert "STACK:0" in line and "LOCAL:0" in line, line


def test_products_keep_to_registers_and_tensor_cores(tmp_path: Path) -> None:
    few, many = GemmTile(32, 32, 128, split=2), GemmTile(128, 128, 64, warps=8, stages=3)
    launches = [product_launch(tile, torch.float16) for tile in (few, many)]
    for line in resources(launches, tmp_path):
        assert "STACK:0" in line and "LOCAL:0" in line, line
    texts = [ptx(one.choice.unit, tmp_path) for one in launches]
    assert "mma.sync" in texts[0] and "wgmma.mma_async" in texts[1]
    assert all("cp.async.cg.shared.global" in text for text in texts)
    assert "atom.global.gpu.acq_rel.add" in texts[0].replace("@%p1 ", "")


def test_the_sums_of_a_split_product_are_there_before_it_is_counted(tmp_path: Path) -> None:
    """Every thread's stores, a barrier, and then one thread's atomic with release and acquire."""
    text = ptx(product_launch(GemmTile(32, 32, 128, split=2), torch.float16).choice.unit, tmp_path)
    counted = text.index("atom.global.gpu.acq_rel")
    stored = text.rindex("st.global", 0, counted)
    assert "bar.sync" in text[stored:counted]
    assert "ld.global.cg" in text[counted:]


def followed_by_tanh(lead: tuple[Dim, ...], columns: int, tile: GemmTile) -> LibraryLaunch:
    """tanh(x @ w.T + bias): also one that is read as it is, so that there are two stores."""
    b = IrBuilder()
    x = b.make("input", (), (*lead, 768), torch.bfloat16, index=0)
    w = b.make("const", (), (columns, 768), torch.bfloat16, index=0)
    bias = b.make("const", (), (columns,), torch.bfloat16, index=1)
    y = b.make("linear", (x, w), (*lead, columns), torch.bfloat16)
    biased = b.pointwise("add", y, b.broadcast(bias, y.shape))
    fused, group = fused_with(b, [biased, b.pointwise("tanh", biased)], [x])
    epilogue = group_epilogue(group, y, fused)
    assert epilogue is not None
    product = product_of(y, epilogue)
    assert product is not None
    return launch(product, tile, None, Counters(64), SizeRelations(), early=True)


@pytest.mark.parametrize("tile", [GemmTile(32, 32, 128), GemmTile(32, 32, 128, split=2)], ids=str)
@pytest.mark.parametrize("sizes", [((1,), 768), ((1, 1), 768), ((S,), 1), ((1,), 1)], ids=str)
def test_what_has_size_one_is_stored_from_a_whole_block(
    sizes: tuple[tuple[Dim, ...], int], tile: GemmTile
) -> None:
    """The interpreter broadcasts a pointer to its value's shape; the compiler does not."""
    unit = followed_by_tanh(*sizes, tile).choice.unit
    assert compile_units([unit], GpuTarget()).startswith(b"blade.cubins 1\n1\n")


@pytest.mark.parametrize("kernel", [1, 3])
def test_what_a_convolution_sees_is_copied_16_bytes_at_a_time(kernel: int, tmp_path: Path) -> None:
    b, images = IrBuilder(), (symbol("s0"), S, symbol("s2"), 128)
    x = b.make("input", (), images, torch.float16, index=0)
    stored = b.make("const", (), (64, kernel, kernel, 128), torch.float16, index=0)
    y = b.make(
        "conv",
        (x, b.permute(stored, (0, 3, 1, 2))),
        (*images[:-1], 64),
        torch.float16,
        stride=(1, 1),
        padding=(kernel // 2, kernel // 2),
        dilation=(1, 1),
        groups=1,
        activation=None,
        transposed=False,
    )
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    made = launch(product, GemmTile(64, 64, 64), None, Counters(64), SizeRelations(), early=True)
    text = ptx(made.choice.unit, tmp_path)
    assert "cp.async.cg.shared.global" in text and "wgmma.mma_async" in text
    assert accesses(text, "ld.global") <= {16}
    for line in resources([made], tmp_path):
        assert "STACK:0" in line and "LOCAL:0" in line, line

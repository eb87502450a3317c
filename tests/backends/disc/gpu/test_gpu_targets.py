# SPDX-License-Identifier: Apache-2.0
"""Every kind of kernel compiled for GPUs that are not here: it keeps to the limits of each.

A few units of each kind; all of them take an hour: BLADE_GPU_KERNELS=all pytest ...
"""

import os
from dataclasses import replace

import pytest
from cubin_resources import architecture, registers
from every_kernel import KINDS, one_of_each

from blade.backends.disc.gpu.compile.server import compile_in_forks
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.target.gpu import AMD, NAMED, REGISTERS, GpuTarget

pytestmark = pytest.mark.needs("triton")

MOST = 5  # units of a kind
FP8 = "products in fp8"
COMPILED_FOR = {
    "sm_80": "sm_80",
    "sm_86": "sm_86",
    "sm_89": "sm_89",
    "sm_90": "sm_90a",
    "sm_100": "sm_100a",
    "sm_120": "sm_120a",
}


def units(kind: str, target: GpuTarget) -> list[TritonUnit]:
    """Units of ``kind``, spread over all of them, of every function a few."""
    found = [*KINDS[kind](target).values()]
    assert found
    if os.environ.get("BLADE_GPU_KERNELS") == "all":
        return found
    step = max(1, len(found) // MOST)
    return found[::step]


def is_compiled(kind: str, target: GpuTarget) -> bool:
    """Triton converts floats of 8 bits from sm_89 on."""
    return kind != FP8 or bool(target.gfx) or target.arch >= 89


@pytest.mark.parametrize("name", [*NAMED, *AMD])
def test_some_kernels_compile_for_every_target(name: str) -> None:
    """Rows, points and products of one small graph."""
    target = {**NAMED, **AMD}[name]
    given = [*one_of_each(target).values()]
    assert {unit.name.split("_")[0] for unit in given} == {"row", "loop", "linear"}
    for unit, made in zip(given, compile_in_forks(given, target), strict=True):
        assert isinstance(made, tuple), (unit.name, made)
        code, threads, shared = made
        assert code.startswith(b"\x7fELF") and unit.name.encode() in code
        assert threads == target.lanes * unit.warps and shared <= target.shared


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_kernels_keep_to_the_limits_of_a_target(name: str, kind: str) -> None:
    target = NAMED[name]
    given = units(kind, target)
    for unit, made in zip(given, compile_in_forks(given, target), strict=True):
        if not is_compiled(kind, target):
            assert not isinstance(made, tuple) or unit.name.startswith(("row", "loop"))
            continue
        assert isinstance(made, tuple), (unit.name, made)
        code, threads, shared = made
        assert unit.name.encode() in code and architecture(code) == COMPILED_FOR[name]
        assert threads == 32 * unit.warps and shared <= target.shared
        taken = -(-registers(code) // 8) * 8  # a warp's are given out in eights
        assert 0 < taken * threads <= REGISTERS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AMD)
def test_kernels_become_code_objects_for_amd(name: str, kind: str) -> None:
    """Nothing launches them: that Triton emits code is all that is known."""
    target = AMD[name]
    given = units(kind, target)
    if (name, kind) == ("gfx1100", FP8):  # none was done within 100 s
        given = [unit for unit in given if not unit.name.startswith("linear")]
    for unit, made in zip(given, compile_in_forks(given, target), strict=True):
        assert isinstance(made, tuple), (unit.name, made)
        code, threads, shared = made
        assert code.startswith(b"\x7fELF") and name.encode() in code
        assert threads == target.lanes * unit.warps and shared <= target.shared


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_a_stage_less_where_blocks_are_small(name: str) -> None:
    """The same launch: only how far ahead it loads follows from the shared memory."""
    target = NAMED[name]
    given = one_of_each(target, 768).values()
    unit = max(given, key=lambda u: dict(u.constants).get("BLOCK_K", 0))
    assert unit.stages > 2
    free, tight = (
        compile_in_forks([unit], replace(target, shared=shared))[0]
        for shared in (target.shared, 24 << 10)
    )
    assert isinstance(free, tuple) and isinstance(tight, tuple), (free, tight)
    assert tight[1] == free[1] and tight[2] <= 24 << 10 < free[2]
    [none] = compile_in_forks([unit], replace(target, shared=64))
    assert isinstance(none, str) and "bytes of shared memory, a block has 64" in none

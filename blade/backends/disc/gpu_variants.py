# SPDX-License-Identifier: Apache-2.0
"""Code for GPUs that are not here: an engine has a complete program for each, and one object with all kernels.

    compiled, left = with_targets(own, target, ("sm_80", "sm_100"), compile_for)

Tiles, grids, conditions and scratch memory follow from the target, so programs are not shared. The constants
are: each program refers to the same list. The runtime takes the program that suits the device (FORMAT.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from blade.backends.disc.compiler import CompiledProgram
from blade.backends.disc.gpu.compile.compile import merge_objects
from blade.backends.disc.target.gpu import NAMED, GpuTarget
from blade.core.reason import Code
from blade.errors import Refused


def with_targets(
    own: CompiledProgram,
    target: GpuTarget,
    names: Sequence[str],
    compile_for: Callable[[GpuTarget], CompiledProgram],
) -> tuple[CompiledProgram, dict[str, str]]:
    """``own``, compiled for ``target``, with the programs of ``names``; and why some of them are left out."""
    found, left = [own], dict[str, str]()
    for name in names:
        if NAMED[name].arch == target.arch:
            continue
        try:
            found.append(_checked(own, compile_for(NAMED[name])))
        except Refused as refused:
            left[name] = str(refused)
    return _joined(found), left


def _checked(own: CompiledProgram, other: CompiledProgram) -> CompiledProgram:
    """``other``, if its constants are those of ``own``."""
    pairs = zip(own.constants, other.constants, strict=False)
    if len(own.constants) != len(other.constants) or not all(_same(a, b) for a, b in pairs):
        raise Refused(Code.CONVERSION_FAILED, "Its program has other constants.")
    return other


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
    return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _joined(programs: Sequence[CompiledProgram]) -> CompiledProgram:
    if len(programs) == 1:
        return programs[0]
    ops = {name: op for one in programs for name, op in one.kernel_ops.items()}
    text = "".join(one.program for one in programs)
    code = merge_objects([one.object for one in programs])
    return replace(programs[0], program=text, object=code, kernel_ops=ops)

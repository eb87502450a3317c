# SPDX-License-Identifier: Apache-2.0
"""Units are named by everything their code depends on."""

import pytest

from blade.backends.disc.gpu.compile.triton_unit import named_unit
from blade.backends.disc.target.gpu import GpuTarget

TEXT = "@triton.jit\ndef kernel(p0, n, BLOCK: tl.constexpr):\n    pass\n"
SIGNATURE = (("p0", "*fp32"), ("n", "i64"))


def test_the_name_is_the_content() -> None:
    unit = named_unit("loop", TEXT, SIGNATURE, (("BLOCK", 128),))
    assert unit == named_unit("loop", TEXT, SIGNATURE, (("BLOCK", 128),))
    assert unit.name.startswith("loop_")
    assert f"def {unit.name}(p0, n, BLOCK" in unit.text
    assert unit.pointers == 1
    others = [
        named_unit("loop", TEXT, SIGNATURE, (("BLOCK", 256),)),
        named_unit("loop", TEXT, SIGNATURE, (("BLOCK", 128),), aligned=("p0",)),
        named_unit("loop", TEXT, SIGNATURE, (("BLOCK", 128),), warps=8),
        named_unit("loop", TEXT.replace("pass", "return"), SIGNATURE, (("BLOCK", 128),)),
    ]
    assert len({u.name for u in (unit, *others)}) == 5


def test_the_text_defines_one_kernel() -> None:
    with pytest.raises(AssertionError):
        named_unit("loop", "def other(): pass", SIGNATURE)


def test_isa_names_the_architecture() -> None:
    assert GpuTarget(arch=80).isa == ("sm_80",)

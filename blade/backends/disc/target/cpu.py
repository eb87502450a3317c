# SPDX-License-Identifier: Apache-2.0
"""The CPU that kernels are generated for: vector width and the required features.

``host()`` describes the running machine. Feature names are those of ``lscpu`` / ``/proc/cpuinfo``; the
C++ runtime compares them with its own CPU before it loads the object. It lists AMX only where Linux lets this process
use it.
"""

import functools
import platform
from dataclasses import dataclass

from blade.runtime.engine import isa_features

# Features that LLVM may use in code for the host, as far as they change generated kernels.
_X86 = (
    "sse4_1 sse4_2 popcnt avx avx2 fma f16c bmi1 bmi2 movbe abm "
    "avx512f avx512bw avx512dq avx512vl avx512cd avx512_vnni avx512_bf16 avx512_fp16 avx512vbmi "
    "avx512_vbmi2 avx512ifma avx512_bitalg avx512_vpopcntdq avx_vnni gfni vaes vpclmulqdq "
    "amx_tile amx_bf16 amx_int8"
).split()
_ARM = "fp asimd asimdhp fphp asimddp bf16 i8mm sve sve2".split()


@dataclass(frozen=True)
class CpuTarget:
    """Vectors have ``lanes`` elements of any type; ``isa`` lists the features that a CPU must have."""

    isa: tuple[str, ...]
    lanes: int

    @property
    def registers(self) -> int:
        """Number of vector registers of ``lanes`` floats."""
        return 32 if self.lanes == 16 or "asimd" in self.isa else 16

    @property
    def has_bf16_products(self) -> bool:
        """Whether one instruction multiplies pairs of bfloat16 and sums them in float32."""
        return self.lanes == 16 and "avx512_bf16" in self.isa

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether one instruction multiplies 16 x 32 by 32 x 16 bfloat16."""
        return self.has_bf16_products and {"amx_tile", "amx_bf16"} <= set(self.isa)

    @property
    def has_int8_tiles(self) -> bool:
        """Whether one instruction multiplies 16 x 64 by 64 x 16 bytes."""
        return self.lanes == 16 and {"avx512_vnni", "amx_tile", "amx_int8"} <= set(self.isa)

    @property
    def has_half(self) -> bool:
        """Whether float16 conversion is an instruction (otherwise it is a call into compiler-rt)."""
        return "f16c" in self.isa or "asimd" in self.isa


@functools.lru_cache(maxsize=1)
def host() -> CpuTarget:
    """The machine this process runs on."""
    present = isa_features()
    known = _ARM if platform.machine() in ("aarch64", "arm64") else _X86
    isa = tuple(flag for flag in known if flag in present)
    if "avx512f" in isa and "avx512bw" in isa and "avx512vl" in isa and "avx512dq" in isa:
        return CpuTarget(isa, 16)
    return CpuTarget(isa, 8 if "avx2" in isa and "fma" in isa else 4)

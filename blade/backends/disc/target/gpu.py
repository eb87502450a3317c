# SPDX-License-Identifier: Apache-2.0
"""The GPU that kernels are generated for: its architecture and the limits that size launches.

target_of(device)           # a device of this machine
NAMED["sm_80"]              # one that is not here: nothing is timed, tables choose
"""

from dataclasses import dataclass, field

import torch

WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor, and at most of a block


@dataclass(frozen=True)
class GpuTarget:
    """``arch``: compute capability as in sm_90; ``shared``: bytes of shared memory per block.

    ``here``: a device of this process, on which kernels can be timed. ``gfx``: LLVM's name of an AMD GPU, for
    which code is emitted and nothing is launched; its wavefronts have ``lanes`` threads.
    """

    arch: int = 90
    multiprocessors: int = 132
    shared: int = 227 * 1024
    here: bool = field(default=True, repr=False)
    gfx: str = field(default="", repr=False)
    lanes: int = field(default=WARP, repr=False)

    @property
    def isa(self) -> tuple[str, ...]:
        """Properties that a device must have to run the code.

        sm_100a: Triton compiles for one architecture, with instructions that its successors lack, from sm_90
        on. There is no other device of major version 9, so its name has stayed sm_90.
        """
        return (self.gfx or f"sm_{self.arch}{'a' * (self.arch >= 100)}",)

    @property
    def triton(self) -> tuple[str, int | str, int]:
        """The arguments of Triton's ``GPUTarget``."""
        return ("hip", self.gfx, self.lanes) if self.gfx else ("cuda", self.arch, WARP)

    @property
    def starts_early(self) -> bool:
        """Whether a launch can start before the launch it depends on has ended."""
        return not self.gfx and self.arch >= 90


def _named(arch: int, multiprocessors: int, kib: int) -> GpuTarget:
    return GpuTarget(arch, multiprocessors, kib << 10, here=False)


NAMED: dict[str, GpuTarget] = {
    "sm_80": _named(80, 108, 163),
    "sm_86": _named(86, 72, 99),
    "sm_89": _named(89, 142, 99),
    "sm_90": _named(90, 132, 227),
    "sm_100": _named(100, 148, 227),
    "sm_120": _named(120, 170, 99),
}
"""The targets of ``Config.gpu_targets``, with the multiprocessors of A100, A10, L40S, H100, B200 and RTX 5090."""

AMD: dict[str, GpuTarget] = {
    "gfx942": GpuTarget(0, 304, 64 << 10, False, "gfx942", 64),
    "gfx1100": GpuTarget(0, 96, 64 << 10, False, "gfx1100", 32),
}
"""Targets for which kernels are compiled as a test: no runtime launches them."""


def target_of(device: torch.device | None = None) -> GpuTarget:
    """The CUDA device ``device`` (default: the current one); raises torch's error if there is none."""
    found = torch.cuda.get_device_properties(device)
    return GpuTarget(
        10 * found.major + found.minor,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
    )

# SPDX-License-Identifier: Apache-2.0
"""The GPU that kernels are generated for: its architecture and the limits that size launches."""

from dataclasses import dataclass

import torch

WARP = 32  # threads


@dataclass(frozen=True)
class GpuTarget:
    """``arch``: compute capability as in sm_90; ``shared``: bytes of shared memory per block."""

    arch: int = 90
    multiprocessors: int = 132
    shared: int = 227 * 1024

    @property
    def isa(self) -> tuple[str, ...]:
        """Properties that a device must have to run the code."""
        return (f"sm_{self.arch}",)

    @property
    def starts_early(self) -> bool:
        """Whether a launch can start before the launch it depends on has ended."""
        return self.arch >= 90


def target_of(device: torch.device | None = None) -> GpuTarget:
    """The CUDA device ``device`` (default: the current one); raises torch's error if there is none."""
    found = torch.cuda.get_device_properties(device)
    return GpuTarget(
        10 * found.major + found.minor,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
    )

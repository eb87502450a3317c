# SPDX-License-Identifier: Apache-2.0
"""Random generators for contents that verification draws, apart from torch's own.

generators = Generators(seed=0)
torch.rand(8, device="cuda", generator=generators.on(torch.device("cuda")))
"""

import torch


class Generators:
    """A generator per device, of one seed: numbers are drawn where they are used, as a CPU takes seconds for those of
    large activations.

    The same seed draws the same numbers on the same kind of device.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._found: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of ``device``."""
        if device not in self._found:
            self._found[device] = torch.Generator(device).manual_seed(self._seed)
        return self._found[device]

    def signs(self, like: torch.Tensor) -> torch.Tensor:
        """1 or -1 for each element of ``like``, of its shape, dtype and device."""
        drawn = torch.randint(
            0, 2, like.shape, generator=self.on(like.device), dtype=like.dtype, device=like.device
        )
        return drawn.mul_(2).sub_(1)

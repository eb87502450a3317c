# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line speak in."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Done:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


class Net(torch.nn.Module):
    """At the top of a module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@dataclass(frozen=True)
class Files:
    folder: Path
    model: str
    samples: str
    pickled: str
    weights: str
    optimized: str

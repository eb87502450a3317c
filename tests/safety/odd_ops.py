# SPDX-License-Identifier: Apache-2.0
"""Ops and models that end or stop the process at sizes that are not the user's."""

import os
import signal
import time
import warnings
from typing import Any

import torch
from torch import nn

SIZE = 8  # of the samples

_ATEN: list[torch.library.Library] = []
_LIBRARY = torch.library.Library("blade_odd", "DEF")
_LIBRARY.define("dies(Tensor x) -> Tensor")
_LIBRARY.define("hangs(Tensor x) -> Tensor")
_LIBRARY.define("exits(Tensor x) -> Tensor")


def _is_odd(x: torch.Tensor) -> bool:
    return x.shape[0] % 2 == 1


def _dies(x: torch.Tensor) -> torch.Tensor:
    if _is_odd(x):
        os.kill(os.getpid(), signal.SIGSEGV)
    return x + 1


def _hangs(x: torch.Tensor) -> torch.Tensor:
    if _is_odd(x):
        time.sleep(600)
    return x + 1


def _exits(x: torch.Tensor) -> torch.Tensor:
    if _is_odd(x):
        os._exit(3)
    return x + 1


def break_i1e() -> None:
    """From now on ``aten::special_i1e`` ends this process where all of its input is zero; for processes of a test."""

    def dies_at_zeros(x: torch.Tensor) -> torch.Tensor:
        if not bool(x.any()):
            os.kill(os.getpid(), signal.SIGSEGV)
        return x.sigmoid()

    _ATEN.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is another kernel
        _ATEN[-1].impl("special_i1e", dies_at_zeros, "CPU")


for _name, _op in (
    ("dies", _dies),
    ("hangs", _hangs),
    ("exits", _exits),
):
    _LIBRARY.impl(_name, _op, "CPU")
    _LIBRARY.impl(_name, lambda x: torch.empty_like(x), "Meta")


class Odd(nn.Module):
    """Some arithmetic around one of the ops."""

    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.op = op

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return getattr(torch.ops.blade_odd, self.op)(h) * 2 + x


class AtZeros(nn.Module):
    """After ``break_i1e``, contents that only verification makes up end the process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.special.i1e(x) * 2)


def sample(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(size))

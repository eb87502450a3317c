# SPDX-License-Identifier: Apache-2.0
"""Outputs that are computed one by one, each under modes that do not last meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.timing.free_cpus import on_free_cpus
from blade.verification.cases import Case


def each_guarded(
    case: Case,
    outputs: Iterator[tuple[int, torch.Tensor]],
    *modes: Callable[..., AbstractContextManager[Any]],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``outputs``, each computed under ``modes``, which take the inputs; nothing from one on that raises."""

    def compute() -> tuple[int, torch.Tensor] | None:
        with ExitStack() as stack, torchscript.unoptimized(), on_free_cpus():
            for mode in modes:
                stack.enter_context(mode(*case.inputs))
            return next(outputs, None)

    while True:
        found = attempt(Stage.VERIFY, None, case.name, compute)
        if found is None or isinstance(found, Reason):
            return
        yield found
        del found  # the next one is computed meanwhile

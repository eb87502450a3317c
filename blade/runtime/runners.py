# SPDX-License-Identifier: Apache-2.0
"""Which module computes the engines of which backend: imported when the first such engine runs.

A saved module may need any of them in a process that never heard of its backend; ``import blade`` announces
all and imports none. Each has ``load(name, payload, constants, program)``, a ``LoadRunner``.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import cast

import torch

from blade.runtime.engine import LoadRunner, register_runner

RUNNERS: dict[str, str] = {
    "tensorrt": "blade.backends.tensorrt.runner",
    "inductor": "blade.backends.inductor.run",
    "tvm": "blade.backends.tvm.run",
    "onnxruntime": "blade.backends.onnxruntime.session",
    "openvino": "blade.backends.openvino.session",
}


def announce_runners() -> None:
    """Registers every built-in runner."""
    for backend, module in RUNNERS.items():
        register_runner(backend, _when_needed(module))


def _when_needed(module: str) -> LoadRunner:
    def load(
        name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        found = cast(LoadRunner, importlib.import_module(module).load)
        return found(name, payload, constants, program)

    return load

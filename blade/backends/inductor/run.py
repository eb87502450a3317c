# SPDX-License-Identifier: Apache-2.0
"""Load a package of AOTInductor and call it, from many threads at once.

    run = load("cluster_0", payload, constants, program)
    outputs = run([x, y])

The library is unpacked into a private folder, which is removed once it is mapped. Weights are the engine's
constants, read in place.
"""

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from blade.backends.inductor.folding import constants_read, run_recipes
from blade.backends.inductor.package import LIBRARY, InductorPackage, read_package
from blade.backends.shared.weight_versions import WeightVersions
from blade.core.torch_modes import without_modes
from blade.errors import BackendError
from blade.graph.shapes.memory_format import in_order, order_of

LEAST_CALLS = 8  # least number of concurrent calls; further calls wait


def load(
    name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
) -> "InductorModel":
    """The runner of an engine. Raises ``BackendError`` if the package cannot run in this process."""
    package = read_package(payload.numpy().tobytes(), len(constants))
    return InductorModel(package, constants)


class InductorModel:
    """One loaded library over one set of weights."""

    def __init__(self, package: InductorPackage, constants: Sequence[torch.Tensor]) -> None:
        self._orders = package.orders
        held = dict(zip(package.constants, constants, strict=True))
        read = constants_read(package.recipes)
        self._written = WeightVersions([held[name] for name in read])
        values = {**held, **run_recipes(package.recipes, held)}
        given = {name: _alias(values[original]) for name, original in package.names.items()}
        self._runner = _open(package)
        if given:
            self._runner.update_constant_buffer(given, False, True, True)
        # keeps the weights alive, as the library does not
        let_go = [(tensor, _nothing(tensor)) for tensor in given.values()]
        weakref.finalize(self, _let_go, let_go).atexit = False

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._written.since():
            raise BackendError("a weight of which there is a packed copy was written in place.")
        given = [
            tensor.contiguous() if order is None else _laid_out(tensor, order)
            for tensor, order in zip(inputs, self._orders, strict=True)
        ]
        outputs: Sequence[torch.Tensor] = self._runner.run(given)
        return outputs


def _open(package: InductorPackage) -> Any:
    calls = max(LEAST_CALLS, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="blade-inductor-") as folder:
        for name, data in package.files.items():
            Path(folder, name).write_bytes(data)
        try:
            return torch._C._aoti.AOTIModelContainerRunnerCpu(str(Path(folder, LIBRARY)), calls)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendError(f"AOTInductor's library cannot be loaded: {first}") from error


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same memory."""
    return tensor.detach()


def _nothing(like: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros(1, dtype=like.dtype, device="cpu")
    return nothing.to_mkldnn() if like.is_mkldnn else nothing


def _let_go(given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Release the memory of tensors, which get that of others: the library never releases the tensors themselves.

    The garbage collector may call this where every tensor that is made is fake, as inside of ``torch.export``.
    """
    with without_modes():
        for tensor, nothing in given:
            tensor.data = nothing


def _laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return tensor if order_of(tensor) == tuple(order) else in_order(tensor.contiguous(), order)

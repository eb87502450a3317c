# SPDX-License-Identifier: Apache-2.0
"""A cluster computed in fp64: the truth that engine and original are both measured against.

truth = Fp64(cluster.gm)            # weights are widened once
outputs = truth(inputs)             # raises where an op has no fp64 implementation
"""

from typing import Any

import torch

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Fp64(torch.fx.Interpreter):
    """Runs an FX graph with every float tensor, constant and dtype argument widened to fp64."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._constants: dict[str, Any] = {}

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = self.run(*(_widen(t) for t in inputs), enable_io_processing=False)
        return tuple(outputs)

    def fetch_attr(self, target: str) -> Any:
        if target not in self._constants:
            self._constants[target] = _widen(super().fetch_attr(target))
        return self._constants[target]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = torch.utils._pytree.tree_map(_widen, args)
        kwargs = torch.utils._pytree.tree_map(_widen, kwargs)
        # Factories without a dtype argument give the default dtype: widen what comes out as well.
        return torch.utils._pytree.tree_map(_widen, super().call_function(target, args, kwargs))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in _NARROW:
            return value.double()
        return value.to(torch.complex128) if value.dtype == torch.complex64 else value
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value

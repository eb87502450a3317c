# SPDX-License-Identifier: Apache-2.0
"""A cluster computed in fp64: the truth that engine and original are both measured against.

truth = Fp64(cluster.gm)            # weights are widened once
outputs = truth(inputs)             # raises where an op has no fp64 implementation
"""

from typing import Any

import torch

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# What they return is as exact from a narrow table, of which they read few rows.
_PICKS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)


class Fp64(torch.fx.Interpreter):
    """Runs an FX graph with every float tensor, constant and dtype argument widened to fp64."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._widened: dict[int, torch.Tensor] = {}

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = self.run(*(_widen(t) for t in inputs), enable_io_processing=False)
        return tuple(outputs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in _PICKS:
            args = torch.utils._pytree.tree_map(self._once, args)
            kwargs = torch.utils._pytree.tree_map(_widen, kwargs)
        # Factories without a dtype argument give the default dtype: widen what comes out as well.
        return torch.utils._pytree.tree_map(_widen, super().call_function(target, args, kwargs))

    def _once(self, value: Any) -> Any:
        """``value`` widened; a weight, which is the same tensor in every run, only once."""
        if not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
            return _widen(value)
        # whatever an op returned is wide by now: a narrow tensor is an attribute of the module
        if id(value) not in self._widened:
            self._widened[id(value)] = _widen(value)
        return self._widened[id(value)]


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in _NARROW:
            return value.double()
        return value.to(torch.complex128) if value.dtype == torch.complex64 else value
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value

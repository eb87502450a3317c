# SPDX-License-Identifier: Apache-2.0
"""A cluster computed in fp64: the truth that engine and original are both measured against.

truth = Fp64(cluster.gm)            # weights are widened once
outputs = truth(inputs)             # raises where an op has no fp64 implementation

Random numbers are drawn as the cluster draws them: ``Fp64(gm, generators.again)`` puts the generators back first.
"""

from collections.abc import Callable
from typing import Any

import torch

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# What they return is as exact from a narrow table, of which they read few rows.
_PICKS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)
# Run in the dtypes they have: others draw in another order from the same generator, and kernels of attention on a
# GPU have no fp64.
_AS_IT_IS = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *(("native_dropout", "default"), ("bernoulli", "default"), ("bernoulli", "p")),
        *((name, "default") for name in ("rand", "rand_like", "randn", "randn_like")),
        *(
            (f"_scaled_dot_product_{kernel}_attention{end}", "default")
            for kernel in ("cudnn", "flash", "efficient")
            for end in ("", "_backward")
        ),
    )
)


class Fp64(torch.fx.Interpreter):
    """Runs an FX graph with every float tensor, constant and dtype argument widened to fp64."""

    def __init__(self, gm: torch.fx.GraphModule, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._before = before
        self._widened: dict[int, torch.Tensor] = {}

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._before()
        with torch.no_grad():
            outputs = self.run(*(_widen(t) for t in inputs), enable_io_processing=False)
        return tuple(outputs)

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target not in _AS_IT_IS:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        narrow = [_narrowed(a, b) for a, b in zip(args, n.args, strict=True)]
        made = n.target(*narrow, **kwargs)  # type: ignore[operator]
        return torch.utils._pytree.tree_map(_widen, made)

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


def _narrowed(value: Any, given: Any) -> Any:
    """A widened operand in the dtype of the node it is the value of."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(given.meta["val"].dtype)
    return value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in _NARROW:
            return value.double()
        return value.to(torch.complex128) if value.dtype == torch.complex64 else value
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value

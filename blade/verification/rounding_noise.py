# SPDX-License-Identifier: Apache-2.0
"""A cluster whose sums are off by one rounding: the error that its own arithmetic leaves open.

    noisy = [RoundingNoise(cluster.gm, seed)(*inputs) for seed in range(3)]

Summation order is unspecified. Normalizing nearly constant data (a plane of nothing but a convolution's bias)
amplifies that rounding error by 1 / sqrt(eps), so two correct engines may differ. This is Monte Carlo
arithmetic (D. S. Parker, 1997), of sums, and in fp64 of pointwise ops: copies and comparisons round as torch does.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Any

import torch

from blade.graph.fx.interpreter import Interpreter
from blade.verification.generators import Generators

# Ops whose results are off by a rounding;
_SUMS = frozenset(
    "mm bmm addmm baddbmm addmv addr mv dot vdot matmul linear bilinear einsum convolution _convolution conv1d "
    "conv2d conv3d convolution_backward conv_transpose1d conv_transpose2d conv_transpose3d sum mean var std "
    "var_mean std_mean cumsum "
    "scaled_dot_product_attention avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d _adaptive_avg_pool2d".split()
)
# those that reduce many numbers to one;
_MEANS = frozenset(("sum", "mean"))
# and norms, which contain a mean: how many numbers it is taken over, from their arguments.
_NORMS: dict[str, Callable[[Sequence[Any]], int]] = {
    "instance_norm": lambda args: prod(args[0].shape[2:]),
    "group_norm": lambda args: prod(args[0].shape[1:]) // args[1],
    "native_group_norm": lambda args: args[4] * args[5] // args[6],
    "layer_norm": lambda args: prod(args[1]),
    "native_layer_norm": lambda args: prod(args[1]),
}
# Pointwise ops whose results are exact.
_EXACT = frozenset(
    "abs neg sign sgn relu relu6 hardtanh clamp clamp_min clamp_max maximum minimum fmax fmin where masked_fill "
    "floor ceil round trunc frac positive clone nan_to_num threshold copysign heaviside ldexp".split()
)


# Pointwise ops whose results below the normal numbers are exact.
_DIFFERENCES = frozenset(("add", "sub", "rsub"))
_LEAST = 5e-324  # of float64


class RoundingNoise(Interpreter):
    """Run an FX graph; each float that a sum returns is rounded up or down, drawn from ``seed``.

    A mean of n numbers, inside a norm too, is off by sqrt(n) roundings (N. Higham and T. Mary, A new approach
    to probabilistic rounding error analysis, 2019). In fp64, which no reference is more exact than, so is what a
    pointwise op returns.
    """

    def __init__(
        self, gm: torch.fx.GraphModule, seed: int, before: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._generators = Generators(seed)
        self._before = before

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._before()
        outputs: tuple[torch.Tensor, ...] = self.run(*inputs, enable_io_processing=False)
        return outputs

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
        if name in _NORMS:
            args = (perturb_by_ulp(args[0], self._generators, sqrt(_NORMS[name](args))), *args[1:])
        made = super().call_function(target, args, kwargs)
        if name in _MEANS and isinstance(made, torch.Tensor):
            of = args[0].numel() // max(made.numel(), 1)
            return perturb_by_ulp(made, self._generators, sqrt(max(of, 1)))
        if name in _SUMS:
            return perturb_by_ulp(made, self._generators)
        if not _is_fp64(made) or not _is_pointwise(target) or name in _EXACT:
            return made
        moved = perturb_by_ulp(made, self._generators)
        return moved if name in _DIFFERENCES else self._perturb_underflow(made, moved, args)

    def _perturb_underflow(
        self, made: torch.Tensor, moved: torch.Tensor, args: Sequence[Any]
    ) -> torch.Tensor:
        """``moved``, with numbers below the normal ones, 0 of other numbers too, off by the least one there is.

        Products of small numbers round to a multiple of it, unless a sum contracts them.
        """
        low = made.abs() < torch.finfo(made.dtype).tiny
        for one in args:
            if isinstance(one, (torch.Tensor, int, float)):
                low = low & (one != 0)
        if not bool(low.any()):
            return moved
        return torch.where(low, moved + self._generators.signs(made) * _LEAST, moved)


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in getattr(target, "tags", ())


def _is_fp64(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def perturb_by_ulp(value: Any, generators: Generators, roundings: float = 1.0) -> Any:
    """Move each float of ``value`` up or down by ``roundings`` units in the last place."""
    if isinstance(value, (tuple, list)):
        return type(value)(perturb_by_ulp(one, generators, roundings) for one in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    by = roundings * torch.finfo(value.dtype).eps
    return torch.addcmul(value, value, generators.signs(value), value=by)

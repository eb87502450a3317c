# SPDX-License-Identifier: Apache-2.0
"""Folds batch norms and constant factors and terms into the weights of convolutions, with torch's passes.

    fold(frozen.graph)      # conv(x) * 2 + c  ->  conv(x), with other weights; in place

What torch folds wrongly stays apart:

* ``_jit_pass_fold_frozen_linear_bn`` does not run. It asks neither whether the linear's result is used
  elsewhere (Dice in DIN), nor whether the result has more than two dimensions: the features of a linear are
  the last dimension, those of a batch norm the second, and the rank is that of the call.
* The dtype of a constant with dimensions: ``conv(x) + c`` is float64 if ``c`` is, the folded convolution float32.
* Factors that are infinite, NaN, or zero below a division: ``inf`` times a sum is not the sum of products with it.

Products with a common operand stay apart as well. torch's GPU pass merges them into one whose results are slices
with gaps: a ``view`` of a slice raises, and torch's memory-efficient attention stops the device if one begins at
an odd address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blade.graph.torchscript.program import nested

_FOLDS = ("conv_bn", "conv_add_or_sub", "conv_mul_or_div")
_FACTORS = ("aten::mul", "aten::div")
_FOLDED = ("aten::batch_norm", "aten::add", "aten::sub", *_FACTORS)
_CONVOLUTIONS = ("aten::_convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d")
_BARRIER = "prim::unchecked_cast"  # an identity, which no fold looks through


def fold(graph: torch._C.Graph) -> None:
    """Fold in place what is constant after each convolution of ``graph``; raises what torch's passes raise."""
    passes: list[Callable[[torch._C.Graph], bool]] = [
        getattr(torch._C, f"_jit_pass_fold_frozen_{name}") for name in _FOLDS
    ]
    with _kept_apart(graph):
        changed = True
        while changed:  # one fold may enable another
            changed = False
            for one in passes:
                changed |= one(graph)


@contextmanager
def _kept_apart(graph: torch._C.Graph) -> Iterator[None]:
    """Separate, while the block runs, each op from its convolution that torch would fold wrongly."""
    barriers = []
    for node in [n for top in graph.nodes() for n in (top, *nested(top))]:
        if node.kind() in _FOLDED and _is_wrong(node):
            barrier = graph.create(_BARRIER, [node.inputsAt(0)], 1)
            barrier.insertBefore(node)
            barrier.output().setType(node.inputsAt(0).type())
            node.replaceInput(0, barrier.output())
            barriers.append(barrier)
    try:
        yield
    finally:
        for barrier in barriers:
            barrier.output().replaceAllUsesWith(barrier.inputsAt(0))
            barrier.destroy()


def _is_wrong(node: torch._C.Node) -> bool:
    """Whether folding ``node`` into the convolution that its first operand comes from changes a dtype or makes NaNs.

    A factor between the two may be folded first, so the convolution is looked for through what is foldable.
    """
    made = node.inputsAt(0).node()
    while made.kind() in _FOLDED:
        made = made.inputsAt(0).node()
    if node.kind() == "aten::batch_norm" or made.kind() not in _CONVOLUTIONS:
        return False
    weight, constant = (_constant(value) for value in (made.inputsAt(1), node.inputsAt(1)))
    if not isinstance(weight, torch.Tensor) or constant is None:
        return False
    if torch.result_type(weight, constant) != weight.dtype:
        return True
    if node.kind() not in _FACTORS:
        return False
    value = torch.as_tensor(constant)
    return not bool(value.isfinite().all()) or (
        node.kind() == "aten::div" and not bool(value.all())
    )


def _constant(value: torch._C.Value) -> Any:
    return value.toIValue() if value.node().kind() == "prim::Constant" else None

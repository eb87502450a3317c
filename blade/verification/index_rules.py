# SPDX-License-Identifier: Apache-2.0
"""Rules that ATen's GPU kernels assert on the contents of their inputs, op by op.

    why = RULES["embedding"]({"weight": weight, "indices": indices, ...})     # "", or what is wrong

On a CPU these ops raise. On a GPU they stop with a device-side assertion (or read and write at any index),
and no later call of the process succeeds. Sources: the uses of CUDA_KERNEL_ASSERT and _assert_async in
aten/src/ATen/native/cuda, and the kernels beside them that do not check.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

Given = Mapping[str, Any]
"""Argument of the op's schema -> its value."""
Rule = Callable[[Given], str]


def _outside(index: torch.Tensor, low: int, high: int) -> str:
    """Return why not every ``low <= index < high``, or ``""``; waits for the device."""
    if not index.numel():
        return ""
    index = index.long()  # a comparison of 8-bit indices with a number would wrap around
    is_outside = bool(((index < low) | (index >= high)).any())
    return f"an index is not in {low}..{high - 1}" if is_outside else ""


def _size(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


def _rows(indices: str, table: str) -> Rule:
    return lambda given: _outside(given[indices], 0, given[table].shape[0])


def _number(indices: str, count: str) -> Rule:
    return lambda given: _outside(given[indices], 0, int(given[count]))


def _along(given: Given) -> str:
    return _outside(given["index"], 0, _size(given["self"], given["dim"]))


def _along_either_end(given: Given) -> str:
    size = _size(given["self"], given["dim"])
    return _outside(given["index"], -size, size)


def _flat(given: Given) -> str:
    count = given["self"].numel()
    return _outside(given["index"], -count, count)


def _each(given: Given) -> str:
    """Indices of ``x[i, j]``: a mask covers as many axes as it has, and its sizes are checked before."""
    axis = 0
    for index in given["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            axis += index.dim()
            continue
        if index is not None:
            size = given["self"].shape[axis]
            if why := _outside(index, -size, size):
                return why
        axis += 1
    return ""


def _bags(given: Given) -> str:
    if why := _rows("indices", "weight")(given):
        return why
    offsets, count = given["offsets"], given["indices"].numel()
    if why := _outside(offsets, 0, count + 1):
        return why
    return "offsets of bags are not in order" if bool((offsets.diff() < 0).any()) else ""


def _classes(given: Given) -> str:
    logits, target = given["self"], given["target"]
    count = logits.shape[1 if logits.dim() > 1 else 0]
    return _outside(target[target != given["ignore_index"]], 0, count)


def _margin(lowest: int) -> Rule:
    return lambda given: _outside(given["target"], lowest, _size(given["self"], -1))


def _cells(spatial: int) -> Rule:
    """Positions of maxima among the last ``spatial`` dimensions of the pooled tensor."""
    return lambda given: _outside(given["indices"], 0, prod(given["self"].shape[-spatial:]))


def _unpooled(given: Given) -> str:
    return _outside(given["indices"], 0, prod(given["output_size"]))


def _unit(tensors: Sequence[torch.Tensor]) -> str:
    """Values in [0, 1]; NaN is outside, too."""
    fine = all(bool(((t >= 0) & (t <= 1)).all()) for t in tensors)
    return "" if fine else "a probability is not in 0..1"


def _bernoulli(given: Given) -> str:
    p = given.get("p", given["self"])
    return _unit([p]) if isinstance(p, torch.Tensor) else ""


def _multinomial(given: Given) -> str:
    weights = given["self"]
    fine = torch.isfinite(weights).all() & (weights >= 0).all() & (weights.sum(-1) > 0).all()
    return "" if bool(fine) else "weights are not finite, negative, or all zero"


def _not_negative(name: str) -> Rule:
    def rule(given: Given) -> str:
        value = given.get(name)
        if not isinstance(value, torch.Tensor):
            return ""
        return "" if bool((value >= 0).all()) else f"{name} is negative or NaN"

    return rule


def _repeats(given: Given) -> str:
    """Repeats sum to the size of the result, if given; with a ``self`` the op decomposes into others."""
    if (why := _not_negative("repeats")(given)) or "self" in given:
        return why
    total, size = int(given["repeats"].sum()), given.get("output_size")
    return f"repeats make {total} rows of {size}" if size not in (None, total) else ""


def _pivots(name: str, rows: str) -> Rule:
    """Rows to swap with, counted from 1."""
    return lambda given: _outside(given[name], 1, given[rows].shape[-2] + 1)


def _masked(given: Given) -> str:
    x, mask, source = given["self"], given["mask"], given["source"]
    wanted = int(torch.broadcast_tensors(x, mask)[1].sum())
    have = source.numel()
    return f"a mask takes {wanted} of {have} elements" if wanted > have else ""


def _asserted(given: Given) -> str:
    return "" if bool(given["self"]) else str(given.get("assert_msg", "an assertion of the model"))


RULES: dict[str, Rule] = {
    "embedding": _rows("indices", "weight"),
    "embedding_renorm": _rows("indices", "self"),
    "embedding_dense_backward": _number("indices", "num_weights"),
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
    "_embedding_bag_dense_backward": _number("indices", "num_weights"),
    "index": _each,
    "_unsafe_index": _each,
    "index_put": _each,
    "_index_put_impl": _each,
    "_unsafe_index_put": _each,
    "index_select": _along,
    "index_add": _along,
    "index_copy": _along,
    "index_reduce": _along,
    "index_fill": _along_either_end,
    "gather": _along,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "take": _flat,
    "put": _flat,
    "nll_loss_forward": _classes,
    "nll_loss_backward": _classes,
    "nll_loss2d_forward": _classes,
    "nll_loss2d_backward": _classes,
    "multi_margin_loss": _margin(0),
    "multilabel_margin_loss_forward": _margin(-1),
    "max_unpool2d": _unpooled,
    "max_unpool3d": _unpooled,
    "max_pool2d_with_indices_backward": _cells(2),
    "max_pool3d_with_indices_backward": _cells(3),
    "adaptive_max_pool2d_backward": _cells(2),
    "adaptive_max_pool3d_backward": _cells(3),
    "binary_cross_entropy": lambda given: _unit([given["self"], given["target"]]),
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    "poisson": _not_negative("self"),
    "repeat_interleave": _repeats,
    "lu_unpack": _pivots("LU_pivots", "LU_data"),
    "linalg_lu_solve": _pivots("pivots", "LU"),
    "masked_scatter": _masked,
    "_assert_async": _asserted,
    "_functional_assert_async": _asserted,
}

# SPDX-License-Identifier: Apache-2.0
"""Declared sizes per dimension (``dynamic_shapes``, ``dynamic_tuning_shapes``)."""

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from blade.capture.derived_shapes import Axis, axes_of, resized
from blade.capture.inputs import CallSignature, Sample, name_of_leaf
from blade.config import Config
from blade.errors import ConfigError

Range = tuple[int, int]


def declared_ranges(
    config: Config, call: CallSignature, samples: Sequence[Sample]
) -> dict[Axis, Range]:
    """Return (low, high), both included, for every dimension with a declared range.

    Raises ``ConfigError`` for an input or axis that does not exist, and for a range that excludes a sample's
    size.
    """
    ranges = _from_dynamic_shapes(config, call, samples[0])
    if config.dynamic_tuning_shapes is not None:
        tuning = config.dynamic_tuning_shapes
        low, high = (axes_of(_at(call, samples[0], shapes)) for shapes in (tuning.min, tuning.max))
        ranges |= {axis: (low[axis], high[axis]) for axis in low}
    field = "dynamic_shapes" if config.dynamic_tuning_shapes is None else "dynamic_tuning_shapes"
    for number, sample in enumerate(samples):
        for axis, size in axes_of(sample).items():
            low_size, high_size = ranges.get(axis, (size, size))
            if not low_size <= size <= high_size:
                raise ConfigError(
                    f"{field}: axis {axis[1]} of {name_of_leaf(call.names, samples[0], axis[0])!r} is declared to "
                    f"lie in {low_size}..{high_size}, but sample {number} has the size {size} there."
                )
    return ranges


def tuning_samples(config: Config, call: CallSignature, sample: Sample) -> list[Sample]:
    """Return ``sample`` at each of the shapes in ``dynamic_tuning_shapes``: min, opts, max."""
    tuning = config.dynamic_tuning_shapes
    if tuning is None:
        return []
    every = dict.fromkeys((tuning.min, *tuning.opts, tuning.max))
    return [_at(call, sample, shapes) for shapes in every]


def _from_dynamic_shapes(config: Config, call: CallSignature, sample: Sample) -> dict[Axis, Range]:
    ranges: dict[Axis, Range] = {}
    for key, axes in (config.dynamic_shapes or {}).items():
        index = _leaf(key, call, sample)
        rank = pytree.tree_leaves(sample)[index].dim()
        for axis, dim in axes.items():
            if not -rank <= axis < rank:
                raise ConfigError(
                    f"dynamic_shapes: input {key!r} has {rank} dimension(s), so there is no axis {axis}."
                )
            if isinstance(dim, tuple):
                ranges[index, axis % rank] = dim
            elif isinstance(dim, int) and not isinstance(dim, bool):
                ranges[index, axis % rank] = (dim, dim)
    return ranges


def _leaf(key: int | str, call: CallSignature, sample: Sample) -> int:
    """Return the index, among the leaves of ``sample``, of the tensor that ``key`` names."""
    names = call.names
    position = key if isinstance(key, int) else names.index(key) if key in names else -1
    if not 0 <= position < len(names):
        raise ConfigError(
            f"dynamic_shapes: there is no input {key!r}; the inputs are {', '.join(names)} "
            f"(or 0..{len(names) - 1})."
        )
    if not isinstance(sample[position], torch.Tensor):
        raise ConfigError(
            f"dynamic_shapes: input {key!r} is not a tensor, it has no axes to narrow."
        )
    return len(pytree.tree_leaves(sample[:position]))


def _at(call: CallSignature, sample: Sample, shapes: Sequence[Sequence[int]]) -> Sample:
    indices = [
        i for i, leaf in enumerate(pytree.tree_leaves(sample)) if isinstance(leaf, torch.Tensor)
    ]
    if len(shapes) != len(indices):
        raise ConfigError(
            f"dynamic_tuning_shapes: gives {len(shapes)} shape(s), the model has {len(indices)} input "
            f"tensor(s) ({', '.join(call.names)})."
        )
    sizes: dict[Axis, int] = {}
    leaves = pytree.tree_leaves(sample)
    for index, shape in zip(indices, shapes):
        if len(shape) != leaves[index].dim():
            raise ConfigError(
                f"dynamic_tuning_shapes: {tuple(shape)} has {len(shape)} dimension(s), the input "
                f"{name_of_leaf(call.names, sample, index)!r} has {leaves[index].dim()}."
            )
        sizes |= {(index, axis): size for axis, size in enumerate(shape)}
    return resized(sample, sizes)

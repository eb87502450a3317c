# SPDX-License-Identifier: Apache-2.0
"""Derive samples of other sizes from the user's, and keep those at which the user's model runs.

The dimensions of all inputs are grouped into classes that change together: dimensions of equal size in every
sample are presumed to be the same symbol, unless the model runs when they change apart. Each class is varied
alone, then all at once. Contents are the user's own, repeated or cut along the axis, so that indices stay in
range and masks stay masks. An empty axis has none: it grows zeros, or small numbers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from blade.capture.inputs import Sample
from blade.graph.shapes.memory_format import in_order, stride_order

Axis = tuple[int, int]  # (index of the tensor among the leaves of a sample, dimension)
AxisSizes = Mapping[Axis, int]

_TRIES = 4  # sizes tried before a class counts as fixed by the model


@dataclass(frozen=True)
class VaryingDimensions:
    """Dimensions that change together, and a size at which the model runs."""

    axes: frozenset[Axis]
    size: int

    @property
    def sizes(self) -> dict[Axis, int]:
        """The new size of each of the dimensions."""
        return dict.fromkeys(sorted(self.axes), self.size)


def axes_of(sample: Sample) -> dict[Axis, int]:
    """Return the size of every dimension of every tensor in ``sample``."""
    leaves = enumerate(pytree.tree_leaves(sample))
    return {
        (index, axis): size
        for index, leaf in leaves
        if isinstance(leaf, torch.Tensor)
        for axis, size in enumerate(leaf.shape)
    }


def resized(sample: Sample, sizes: AxisSizes) -> Sample:
    """Repeat or cut the given dimensions of ``sample`` to other sizes, and keep the memory order of axes.

    Of whole numbers in ascending order the last one is repeated: where rows begin, an op may rely on the order without
    a check.
    """
    leaves, spec = pytree.tree_flatten(sample)
    for (index, axis), size in sizes.items():
        leaf = leaves[index]
        if leaf.shape[axis] == size:
            continue
        if leaf.shape[axis] == 0:
            leaves[index] = _filled(leaf, axis, size)
            continue
        where = torch.arange(size, device=leaf.device)
        where = (
            where.clamp(max=leaf.shape[axis] - 1) if _ascends(leaf) else where % leaf.shape[axis]
        )
        leaves[index] = in_order(leaf.index_select(axis, where), stride_order(leaf))
    result = pytree.tree_unflatten(leaves, spec)
    assert isinstance(result, tuple), result
    return result


def _ascends(leaf: torch.Tensor) -> bool:
    if leaf.dim() != 1 or leaf.dtype not in (torch.int32, torch.int64) or leaf.numel() < 2:
        return False
    return bool((leaf[1:] >= leaf[:-1]).all())


def _filled(empty: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Fill with distinct values if floats, else with zeros, an index that every table has."""
    shape = [*empty.shape[:axis], size, *empty.shape[axis + 1 :]]
    made = empty.new_zeros(shape)
    if made.is_floating_point():
        made.copy_(torch.linspace(0.5, 1, made.numel()).view(shape))
    return made


def find_varying_dimensions(
    samples: Sequence[Sample],
    ranges: Mapping[Axis, tuple[int, int]],
    accepts: Callable[[dict[Axis, int]], bool],
    together: Collection[frozenset[Axis]] = (),
    is_slow: bool = False,
) -> list[VaryingDimensions]:
    """Return the classes of dimensions that may vary, by ``accepts`` (the first sample, so resized, runs).

    ``ranges`` bounds sizes, both ends included; a dimension with a single size is fixed. Dimensions in one of
    ``together`` are not tried apart. ``is_slow``: a call takes seconds, so sizes that halve it come first.
    """
    sizes = axes_of(samples[0])
    used = {size for size in sizes.values() if size > 1}
    found: list[VaryingDimensions] = []

    def vary(axes: frozenset[Axis]) -> VaryingDimensions | None:
        for size in _other_sizes(axes, sizes, ranges, used, is_slow):
            if accepts(dict.fromkeys(sorted(axes), size)):
                used.add(size)
                return VaryingDimensions(axes, size)
        return None

    for one_class in _classes(samples, ranges):
        whole = vary(one_class)
        parts = _parts(one_class, together)
        apart = [one for part in parts if (one := vary(part))] if len(parts) > 1 else []
        if len(apart) > 1 and whole is None:
            # Some other size equals theirs: so far they do not vary with each other, and a trace may be right
            # only where they do.
            vary(frozenset().union(*(one.axes for one in apart)))
        if apart and (whole is None or len(apart) == len(parts)):
            found += apart
        elif whole is not None:
            found.append(whole)
    return found


def _classes(
    samples: Sequence[Sample], ranges: Mapping[Axis, tuple[int, int]]
) -> list[frozenset[Axis]]:
    """Axes of the first sample that have equal sizes in all samples; of a tensor that some leave out, in the others."""
    every = [axes_of(sample) for sample in samples]
    groups: dict[tuple[int | None, ...], list[Axis]] = {}
    for axis in every[0]:
        low, high = ranges.get(axis, (0, 1 << 62))
        if low < high:
            groups.setdefault(tuple(sizes.get(axis) for sizes in every), []).append(axis)
    whole = {sizes: axes for sizes, axes in groups.items() if None not in sizes}
    for sizes, axes in groups.items():
        if None in sizes:
            whole.setdefault(next((one for one in whole if _agree(one, sizes)), sizes), []).extend(
                axes
            )
    return [frozenset(group) for group in whole.values()]


def _agree(one: tuple[int | None, ...], other: tuple[int | None, ...]) -> bool:
    return all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def _parts(axes: frozenset[Axis], together: Collection[frozenset[Axis]]) -> list[frozenset[Axis]]:
    whole = [one for one in together if one <= axes]
    return whole + by_position(axes.difference(*whole))


def by_position(axes: frozenset[Axis]) -> list[frozenset[Axis]]:
    """Split ``axes`` by their position in their tensors: batch with batch, length with length."""
    positions = sorted({axis for _, axis in axes})
    return [frozenset(one for one in axes if one[1] == position) for position in positions]


def _other_sizes(
    axes: frozenset[Axis],
    sizes: AxisSizes,
    ranges: Mapping[Axis, tuple[int, int]],
    used: set[int],
    is_slow: bool,
) -> list[int]:
    """Return up to ``_TRIES`` sizes >= 2 that no other dimension has, nearest first."""
    size = sizes[min(axes)]
    bounds = [ranges[axis] for axis in axes if axis in ranges]
    low = max([2, *(low for low, _ in bounds)])
    # Tensors never get much larger than the user's: a declared maximum may be huge.
    high = min([2 * size + 16, *(high for _, high in bounds)])
    near = size + 2 if size == 1 else size + 3  # a batch of 3 costs three calls
    wanted = [near, size - 3, size // 2, 2 * size, size + 5, size + 7, size - 5]
    if is_slow:
        wanted = [size // 2, size - size // 4, 2 if size == 1 else size - 3, *wanted]
    wanted += [high, low] if bounds else []
    fresh = [n for n in wanted if low <= n <= high and n != size and n not in used]
    return list(dict.fromkeys(fresh))[:_TRIES]

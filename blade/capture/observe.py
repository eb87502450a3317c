# SPDX-License-Identifier: Apache-2.0
"""What the original does at the samples, at other sizes and at other values: the yardstick for a graph.

seen = observe(own, inputs, config, bake=True)
seen.references        # every input tried, with the answers a captured module has to give
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.captured import Reference
from blade.capture.compare import reference
from blade.capture.declared import Range, declared_ranges, tuning_samples
from blade.capture.inputs import Call, Sample, describe, normalize
from blade.capture.model import device_of, signature_of
from blade.capture.original import MODEL_ERRORS, Answer, Original, seeded
from blade.capture.outputs import NotTensors, expect_dense, is_plain
from blade.capture.probes import Axis, Varied, axes_of, find_varied, resized
from blade.config import Config
from blade.errors import ConfigError, InputError

OTHER_VALUES = "other values"  # what a reference is called that has the sample's sizes
TWICE = "twice the size"  # and one that tells of the trace alone
LEAST_BLOCKS = 8  # the smallest size that a model may well take block by block
LARGEST = 1 << 24  # elements of an input made only to try the end of a declared range


@dataclass(frozen=True)
class Observed:
    """One way to call the model, its samples in that form, and what the original answered."""

    call: Call
    original: Original
    samples: tuple[Sample, ...]
    probes: tuple[Sample, ...]
    references: tuple[Reference, ...]
    ranges: dict[Axis, Range]
    is_plain: bool  # forward takes a sample as it is and returns nothing but tensors


def observe(
    model: nn.Module,
    inputs: Any,
    config: Config,
    bake: bool,
    together: Collection[frozenset[Axis]] = (),
) -> Observed:
    """Run ``model`` (a private copy) at ``inputs`` and at what can be derived from them.

    With ``bake`` the view is that of a trace: tensor arguments only, outputs flattened. Dimensions in one
    of ``together`` are varied together only. Raises
    ``InputError`` where ``inputs`` do not fit the model, ``ConfigError`` where the declared sizes do
    not fit the inputs.
    """
    call, samples = normalize(signature_of(model), inputs, bake)
    _check_devices(model, call, samples[0])
    original = Original(model, call, flatten=bake)
    first = [_first_run(original, call, sample, index) for index, sample in enumerate(samples)]
    ranges = declared_ranges(config, call, samples)
    tuning = tuning_samples(config, call, samples[0])
    seen = _Seen(original, together)
    for index, sample in enumerate(samples):
        seen.require(sample, f"sample {index}", call, first[index][1])
    for sample in tuning:
        seen.require(sample, "a shape of dynamic_tuning_shapes", call)
    probes = tuple(seen.vary(samples, ranges))
    if ranges and not tuning:  # the ends of tuning shapes are samples already
        probes += tuple(seen.range_ends(samples[0], ranges))
    if ranges:
        list(seen.vary(samples, {}))
    seen.vary_values(samples[0])
    plain = bake and not call.baked and all(is_plain(output) for output, _ in first)
    everything = (*samples, *tuning)
    return Observed(call, original, everything, probes, tuple(seen.references), ranges, plain)


class _Seen:
    """The references so far; every input is run once."""

    def __init__(self, original: Original, together: Collection[frozenset[Axis]]) -> None:
        self._original, self._together = original, together
        self.references: list[Reference] = []

    def require(self, sample: Sample, what: str, call: Call, answer: Answer | None = None) -> None:
        """Add ``sample``; ``answer`` is what its first run gave, all there is to know without a state."""
        if answer is not None and not self._original.is_stateful:
            self.references.append(Reference(sample, (answer,), frozenset(), what))
        elif not self._add(sample, frozenset(), what):
            shown = describe(call.names, sample)
            raise ConfigError(f"dynamic_tuning_shapes: the model does not run at {what} ({shown}).")

    def vary(self, samples: Sequence[Sample], ranges: dict[Axis, Range]) -> Iterator[Sample]:
        """Yield the probes (all varied sizes >= 2); inputs of size 1 become references only."""
        base = samples[0]

        def accepts(sizes: dict[Axis, int]) -> bool:
            what = "other sizes" if 1 not in sizes.values() else "size 1"
            return self._add(resized(base, sizes), frozenset(sizes), what)

        varied = find_varied(samples, ranges, accepts, self._together)
        least: dict[Axis, int] = {}
        for one in varied:
            yield resized(base, one.sizes)
            if accepts(dict.fromkeys(one.axes, 1)):
                least |= dict.fromkeys(one.axes, 1)
        for doubled in _doubled(base, varied, ranges):
            self._add(resized(base, {**least, **doubled}), frozenset(doubled), TWICE)
        if len(varied) > 1:
            together = _merge(varied)
            if accepts(together):
                yield resized(base, together)
            accepts(dict.fromkeys(together, 1))

    def range_ends(self, sample: Sample, ranges: dict[Axis, Range]) -> Iterator[Sample]:
        """Yield the sample at the lower (at least 2) and at the upper end of all ranges together."""
        for end in (0, 1):
            sizes = {k: max(r[end], 2) if r[0] < r[1] else r[0] for k, r in ranges.items()}
            if not _is_affordable(sample, sizes):
                continue
            one = resized(sample, sizes)
            if self._add(one, frozenset(sizes), "the ends of the declared ranges"):
                yield one

    def vary_values(self, sample: Sample) -> None:
        """Add other contents: floating inputs negated, every input reversed along its longest axis."""
        leaves, spec = pytree.tree_flatten(sample)
        negated = [-x if _is_float(x) else x for x in leaves]
        reversed_ = [_reversed(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        for changed in (negated, reversed_):
            if any(x is not y for x, y in zip(changed, leaves)):
                self._add(pytree.tree_unflatten(changed, spec), frozenset(), OTHER_VALUES)

    def _add(self, sample: Sample, axes: frozenset[Axis], what: str) -> bool:
        one = reference(self._original, sample, axes, what)
        if one is not None:
            self.references.append(one)
        return one is not None


def _is_affordable(sample: Sample, sizes: dict[Axis, int]) -> bool:
    """A declared maximum may be beyond what anyone wants to allocate only to try it."""
    leaves = pytree.tree_leaves(sample)
    shapes = {i: list(x.shape) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    for (index, axis), size in sizes.items():
        shapes[index][axis] = size
    return all(0 not in leaves[i].shape and prod(s) <= LARGEST for i, s in shapes.items())


def _check_devices(model: nn.Module, call: Call, sample: Sample) -> None:
    device = device_of(model)
    if device is None:
        return
    for name, entry in zip(call.names, sample):
        for leaf in pytree.tree_leaves(entry):
            # A 0-d CPU tensor is a number to every kernel.
            if not isinstance(leaf, torch.Tensor) or (leaf.dim() == 0 and leaf.is_cpu):
                continue
            if leaf.device != device:
                raise InputError(
                    f"inputs: argument {name!r} is on {leaf.device}, the model is on {device}; "
                    "move one of them."
                )


def _doubled(
    sample: Sample, varied: Sequence[Varied], ranges: dict[Axis, Range]
) -> Iterator[dict[Axis, int]]:
    """Twice the size of each of ``varied`` that may be cut into blocks.

    A loop over blocks is traced as often as it went around, which is right at a size that is a little larger.
    """
    sizes = axes_of(sample)
    for one in varied:
        size = 2 * sizes[min(one.axes)]
        high = min((ranges[axis][1] for axis in one.axes if axis in ranges), default=size)
        if 2 * LEAST_BLOCKS <= size <= high:
            yield dict.fromkeys(one.axes, size)


def _merge(varied: Sequence[Varied]) -> dict[Axis, int]:
    return {axis: size for one in varied for axis, size in one.sizes.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _reversed(value: torch.Tensor) -> torch.Tensor:
    return (
        value.flip(max(range(value.dim()), key=lambda axis: value.shape[axis]))
        if value.dim()
        else value
    )


def _first_run(original: Original, call: Call, sample: Sample, index: int) -> tuple[Any, Answer]:
    try:
        output, answer = seeded(lambda: original.first(sample))
    except NotTensors:
        raise  # the model does run
    except MODEL_ERRORS as error:
        raise InputError(
            f"inputs: the model does not run on sample {index} ({describe(call.names, sample)}): "
            f"{type(error).__name__}: {error}"
        ) from error
    expect_dense(output)
    return output, answer

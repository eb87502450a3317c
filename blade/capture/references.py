# SPDX-License-Identifier: Apache-2.0
"""Reference answers: the original at the samples, at derived shapes and at other values.

seen = run_references(own, inputs, config, bake=True)
seen.references        # every input tried, with the answers a captured module has to give
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.declared_shapes import Range, declared_ranges, tuning_samples
from blade.capture.derived_shapes import (
    Axis,
    VaryingDimensions,
    axes_of,
    find_varying_dimensions,
    resized,
)
from blade.capture.equivalence import reference
from blade.capture.inputs import CallSignature, Sample, describe, normalize, takes_in_order
from blade.capture.messages import told
from blade.capture.model import device_of, signature_of
from blade.capture.outputs import NotTensors, expect_dense, is_plain
from blade.capture.reference_model import (
    MODEL_ERRORS,
    Answer,
    ReferenceModel,
    seeded,
)
from blade.config import Config
from blade.core.captured import Reference
from blade.core.dtypes import COMPUTED
from blade.core.reason import Code, Reason, Stage
from blade.core.structure import structure_of
from blade.errors import ConfigError, InputError
from blade.process.forked_trial import ForkedRunner
from blade.verification.cases import random_contents
from blade.verification.derived_inputs import can_try
from blade.verification.generators import Generators

OTHER_VALUES = "other values"  # name of a reference with the sample's sizes
TWICE = "twice the size"  # name of a reference that tests the trace alone
TUNING = "a shape of dynamic_tuning_shapes"
LEAST_BLOCKS = 8  # the smallest size that a model may process in blocks
COSTLY = 2.0  # factor of the elements of the inputs beyond which cheaper sizes are looked for
IN_A_ROW = 4  # references at which a model with a state is called one after another
SLOW_S = 2.0  # seconds of a sample's run from which on inputs are fewer and smaller
SLACK = 100.0  # factor to the samples' time after which a derived input is given up
LARGEST = 1 << 24  # elements of an input made only to try the end of a declared range


@dataclass(frozen=True)
class ReferenceRuns:
    """One way to call the model, its samples in that form, and the original's answers."""

    call: CallSignature
    original: ReferenceModel
    samples: tuple[Sample, ...]
    probes: tuple[Sample, ...]
    references: tuple[Reference, ...]
    ranges: dict[Axis, Range]
    crashes: tuple[Reason, ...]  # inputs at which the original ended the process that tried it
    is_plain: bool  # forward takes a sample as it is and returns nothing but tensors
    structures: frozenset[str | None]  # of the outputs at the samples (core/structure.py)

    @cached_property
    def original_may_answer(self) -> bool:
        """Whether the model has no state, or one that shows nowhere: of it the optimized module keeps nothing, and
        the original can answer calls that no path takes."""
        original = self.original
        return not original.is_stateful or original.forgets(
            [r.sample for r in self.references[:IN_A_ROW]]
        )


def run_references(
    model: nn.Module,
    inputs: Any,
    config: Config,
    bake: bool,
    together: Collection[frozenset[Axis]] = (),
) -> ReferenceRuns:
    """Run ``model`` (a private copy) at ``inputs`` and at inputs derived from them.

    With ``bake`` the view is that of a trace: tensor arguments only, outputs flattened. Dimensions in one of
    ``together`` are varied together only. Raises ``InputError`` if ``inputs`` do not fit the model,
    ``ConfigError`` if the declared sizes do not fit the inputs.
    """
    start = perf_counter()
    own = run_samples(model, inputs, config, bake)
    samples, ranges = own.samples, own.ranges
    tuning = tuning_samples(config, own.call, samples[0])
    took_s = perf_counter() - start
    is_slow = took_s > SLOW_S * len(samples)
    with _ReferenceRunner(own.original, own.call, samples[0], together, took_s, is_slow) as seen:
        for one in own.references:
            seen.require(one.sample, one.what, one.answers[0])
        for sample in tuning:
            seen.require(sample, TUNING)
        probes = tuple(seen.vary(samples, ranges))
        if ranges and not tuning:  # the ends of tuning shapes are samples already
            probes += tuple(seen.range_ends(ranges))
        if ranges:
            list(seen.vary(samples, {}))
        seen.vary_values()
    return replace(
        own,
        samples=(*samples, *tuning),
        probes=probes,
        references=tuple(seen.references),
        crashes=tuple(seen.crashes),
    )


def run_samples(model: nn.Module, inputs: Any, config: Config, bake: bool) -> ReferenceRuns:
    """``run_references`` at ``inputs`` alone."""
    call, samples = normalize(signature_of(model), inputs, bake)
    _check_devices(model, call, samples[0])
    original = ReferenceModel(model, call, flatten=bake)
    first = [_first_run(original, call, sample, index) for index, sample in enumerate(samples)]
    references = tuple(
        Reference(sample, (answer,), frozenset(), f"sample {index}")
        for index, (sample, (_, answer)) in enumerate(zip(samples, first))
    )
    plain = bake and takes_in_order(call, signature_of(model))
    return ReferenceRuns(
        call,
        original,
        samples,
        (),
        references,
        declared_ranges(config, call, samples),
        (),
        plain and all(is_plain(output) for output, _ in first),
        frozenset(structure_of(output) for output, _ in first),
    )


def derived(base: Sample, how: Mapping[Axis, int] | str) -> Sample:
    """``base`` with other sizes, or with the change ``how`` of its contents."""
    if not isinstance(how, str):
        return resized(base, how)
    changed = _changed(base, how)
    assert changed is not None, how
    return changed


def further_values(seen: ReferenceRuns) -> tuple[Reference, ...]:
    """The original's answers at contents that are made to show decisions on elements."""
    with _ReferenceRunner(seen.original, seen.call, seen.samples[0], (), SLACK) as runner:
        runner.vary_further()
    return tuple(runner.references)


def answered_at(seen: ReferenceRuns, sizes: dict[Axis, int], what: str) -> Reference | None:
    """The original's answer to the first sample with other ``sizes``; ``None`` if it has none."""
    with _ReferenceRunner(seen.original, seen.call, seen.samples[0], (), SLACK) as runner:
        runner.add_sizes(sizes, what)
    return next(iter(runner.references), None)


def with_constants(seen: ReferenceRuns, sample: Sample) -> tuple[ReferenceRuns, Sample]:
    """``seen`` with the guarded arguments as they are in ``sample``, for a module that has no paths, and
    ``sample`` without them.

    Raises ``InputError`` if they are others in one of the user's samples.
    """
    guards = seen.call.guards
    if not guards:
        return seen, sample
    call, entries = seen.call.with_constants(sample)
    dropped = [i for i in guards if not isinstance(sample[i], torch.Tensor)]

    def is_alike(other: Sample) -> bool:
        return all(type(other[i]) is type(sample[i]) for i in guards) and all(
            other[i] == sample[i] for i in dropped
        )

    def without(other: Sample) -> Sample:
        return tuple(entry for i, entry in enumerate(other) if i not in dropped)

    for index, other in enumerate(seen.samples):
        if not is_alike(other):
            raise InputError(
                f"inputs: sample {index} ({describe(seen.call.names, other)}) has other values than "
                f"({describe(seen.call.names, sample)}). This model has a state or preserved attributes, so it is "
                "captured for one value of each argument that is no tensor."
            )
    references = tuple(
        replace(
            one,
            sample=without(one.sample),
            answers=tuple((output, without(arguments)) for output, arguments in one.answers),
        )
        for one in seen.references
        if is_alike(one.sample)
    )
    made = replace(
        seen,
        call=call,
        original=seen.original.of(call),
        samples=tuple(map(without, seen.samples)),
        probes=tuple(map(without, filter(is_alike, seen.probes))),
        references=references,
    )
    return made, entries


class _ReferenceRunner:
    """Collects the references; every input is run once.

    Inputs derived from ``base`` run in a forked process first (``ForkedRunner``): if the original ends that
    process, or does not return, it counts as rejecting the input, with a Reason. ``took_s``: the seconds
    that the samples took. Of a model that ``is_slow`` fewer inputs are derived, most of them smaller ones.
    """

    def __init__(
        self,
        original: ReferenceModel,
        call: CallSignature,
        base: Sample,
        together: Collection[frozenset[Axis]],
        took_s: float,
        is_slow: bool = False,
    ) -> None:
        self._original, self._call, self._base = original, call, base
        self._together, self._is_slow = together, is_slow
        self._apart = (
            ForkedRunner(self._try, SLACK * took_s, answers=True, usual_s=took_s)
            if can_try([base, *original.tensors()])
            else None
        )
        self._own = axes_of(base)
        self._answered: dict[tuple[frozenset[tuple[Axis, int]], bool], bool] = {}
        self.references: list[Reference] = []
        self.crashes: list[Reason] = []

    def __enter__(self) -> "_ReferenceRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._apart is not None:
            self._apart.close()

    def require(self, sample: Sample, what: str, answer: Answer | None = None) -> None:
        """Add ``sample``; ``answer`` is that of its first run, enough for a model without a state."""
        if answer is not None and not self._original.is_stateful:
            self.references.append(Reference(sample, (answer,), frozenset(), what))
        elif not self._add(sample, frozenset(), what):
            shown = describe(self._call.names, sample)
            raise ConfigError(f"dynamic_tuning_shapes: the model does not run at {what} ({shown}).")

    def vary(self, samples: Sequence[Sample], ranges: dict[Axis, Range]) -> Iterator[Sample]:
        """Yield the probes (all varied sizes >= 2); inputs of size 1 become references only."""
        base = samples[0]

        def accepts(sizes: dict[Axis, int]) -> bool:
            what = "other sizes" if 1 not in sizes.values() else "size 1"
            return self._add_sizes(sizes, frozenset(sizes), what)

        varied = find_varying_dimensions(samples, ranges, accepts, self._together, self._is_slow)
        least: dict[Axis, int] = {}
        for one in varied:
            yield resized(base, one.sizes)
            if accepts(dict.fromkeys(one.axes, 1)):
                least |= dict.fromkeys(one.axes, 1)
        for doubled in () if self._is_slow else _doubled(base, varied, ranges):
            self._add_sizes({**least, **doubled}, frozenset(doubled), TWICE)
        if len(varied) > 1:
            together = _merge(varied)
            for sizes in (*_cheaper(base, varied, ranges), together):
                if accepts(sizes):
                    yield resized(base, sizes)
                    break
            accepts(dict.fromkeys(together, 1))

    def add_sizes(self, sizes: dict[Axis, int], what: str) -> None:
        """Add the first sample with other ``sizes``, if the original answers."""
        self._add_sizes(sizes, frozenset(sizes), what)

    def range_ends(self, ranges: dict[Axis, Range]) -> Iterator[Sample]:
        """Yield the sample at the lower (at least 2) and at the upper end of all ranges together."""
        for end in (0, 1):
            sizes = {k: max(r[end], 2) if r[0] < r[1] else r[0] for k, r in ranges.items()}
            if not _is_affordable(self._base, sizes):
                continue
            if self._add_sizes(sizes, frozenset(sizes), "the ends of the declared ranges"):
                yield resized(self._base, sizes)

    def vary_values(self) -> None:
        """Add other contents: floating inputs negated, inputs reversed along their longest axis, single integers
        made smaller."""
        for change in _FIRST_OF_SLOW if self._is_slow else _FIRST:
            if _changed(self._base, change) is not None:
                self._add_derived(change, frozenset(), OTHER_VALUES)

    def vary_further(self) -> None:
        """Add contents at which decisions on elements show, with the sample's sizes."""
        for change in _FURTHER:
            if _changed(self._base, change) is not None:
                self._add_derived(change, frozenset(), OTHER_VALUES)

    def _add_sizes(self, sizes: dict[Axis, int], axes: frozenset[Axis], what: str) -> bool:
        """``_add_derived``, unless the input is the first sample or a reference already."""
        others = {axis: size for axis, size in sizes.items() if size != self._own[axis]}
        if not others:
            return True
        key = frozenset(others.items())
        known = self._answered.get((key, False))
        if known is None and what == TWICE:  # such a reference is not enough for other purposes
            known = self._answered.get((key, True))
        if known is None:
            known = self._add_derived(others, axes.intersection(others), what)
            self._answered[key, what == TWICE] = known
        return known

    def _add_derived(self, how: "_Derived", axes: frozenset[Axis], what: str) -> bool:
        sample = derived(self._base, how)
        if self._apart is None:
            return self._add(sample, axes, what, how)
        self._apart.post((how, self._original.is_stateful))
        tried = self._apart.result()
        if tried.why is not None:
            shown = describe(self._call.names, sample)
            where = f"At {what} ({shown}), in a process apart,"
            detail = f"{where} the model {tried.why}; nothing is tried or verified there."
            name = self._original.name
            self.crashes.append(Reason(Stage.CAPTURE, Code.PROBE_CRASHED, None, name, detail))
            return False
        if not tried.answers:  # the answers cannot be pickled
            return self._add(sample, axes, what, how)
        [(answers, is_stateful)] = tried.answers
        self._original.is_stateful |= is_stateful
        if answers is not None:
            self.references.append(Reference(sample, answers, axes, what, how))
        return answers is not None

    def _try(self, item: tuple["_Derived", bool]) -> tuple[tuple[Answer, ...] | None, bool]:
        """In the forked process: return the answers, and whether calls change the model's state."""
        how, self._original.is_stateful = item
        one = reference(self._original, derived(self._base, how), frozenset(), "a trial")
        return None if one is None else one.answers, self._original.is_stateful

    def _add(
        self, sample: Sample, axes: frozenset[Axis], what: str, how: "_Derived | None" = None
    ) -> bool:
        one = reference(self._original, sample, axes, what)
        if one is not None:
            self.references.append(replace(one, how=how))
        return one is not None


_Derived = dict[Axis, int] | str
"""Other sizes, or one of ``_CHANGES``."""


def _changed(sample: Sample, change: str) -> Sample | None:
    """Return ``sample`` with other contents; ``None`` if it has nothing to change."""
    leaves, spec = pytree.tree_flatten(sample)
    changed = [_CHANGES[change](x) if _is_changeable(x) else x for x in leaves]
    if all(x is y for x, y in zip(changed, leaves)):
        return None
    result: Sample = pytree.tree_unflatten(changed, spec)
    return result


def _is_changeable(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or leaf.dtype in COMPUTED


def _is_affordable(sample: Sample, sizes: dict[Axis, int]) -> bool:
    """Whether the input is small enough to allocate: a declared maximum may be huge."""
    leaves = pytree.tree_leaves(sample)
    shapes = {i: list(x.shape) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    for (index, axis), size in sizes.items():
        shapes[index][axis] = size
    return all(0 not in leaves[i].shape and prod(s) <= LARGEST for i, s in shapes.items())


def _check_devices(model: nn.Module, call: CallSignature, sample: Sample) -> None:
    device = device_of(model)
    if device is None:
        return
    for name, entry in zip(call.names, sample):
        for leaf in pytree.tree_leaves(entry):
            # A 0-d CPU tensor is a number to every kernel, and one without elements is read for its sizes alone.
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.is_cpu and (leaf.dim() == 0 or leaf.numel() == 0):
                continue
            if leaf.device != device:
                raise InputError(
                    f"inputs: argument {name!r} is on {leaf.device}, the model is on {device}; "
                    "move one of them."
                )


def _doubled(
    sample: Sample, varied: Sequence[VaryingDimensions], ranges: dict[Axis, Range]
) -> Iterator[dict[Axis, int]]:
    """Yield twice the size of each of ``varied`` that may be cut into blocks.

    A loop over blocks is traced with the sample's number of iterations, which is right at slightly larger
    sizes too.
    """
    sizes = axes_of(sample)
    for one in varied:
        size = 2 * sizes[min(one.axes)]
        high = min((ranges[axis][1] for axis in one.axes if axis in ranges), default=size)
        if 2 * LEAST_BLOCKS <= size <= high:
            yield dict.fromkeys(one.axes, size)


def _cheaper(
    sample: Sample, varied: Sequence[VaryingDimensions], ranges: dict[Axis, Range]
) -> Iterator[dict[Axis, int]]:
    """Yield other sizes of all of ``varied`` than those that each runs at alone, if these multiply the work: the
    largest becomes a fraction of the sample's.
    """
    sizes = axes_of(sample)
    together = _merge(varied)
    factor = (
        prod(size / sizes[axis] for axis, size in together.items()) if all(sizes.values()) else 1.0
    )
    largest = max(varied, key=lambda one: sizes[min(one.axes)])
    own = sizes[min(largest.axes)]
    if factor < COSTLY or own < 2 * LEAST_BLOCKS:
        return
    taken = {*sizes.values(), *together.values()}
    low = max((ranges[axis][0] for axis in largest.axes if axis in ranges), default=2)
    smaller = next((n for n in range(max(own // 3, low), own) if n not in taken), None)
    if smaller is not None:
        yield {**together, **dict.fromkeys(largest.axes, smaller)}


def _merge(varied: Sequence[VaryingDimensions]) -> dict[Axis, int]:
    return {axis: size for one in varied for axis, size in one.sizes.items()}


def _negated(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return -value if is_tensor and (value.is_floating_point() or value.is_complex()) else value


def _reversed(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return value.flip(max(range(value.dim()), key=lambda axis: value.shape[axis]))


def _one_less(value: Any) -> Any:
    """A single positive integer is a number more often than an index."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype is torch.bool:
        return value
    if value.is_floating_point() or value.is_complex() or not bool(value > 0):
        return value
    return value - 1


def _scaled(value: Any, by: float) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return value * by if is_tensor and (value.is_floating_point() or value.is_complex()) else value


def _shifted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    return value + value.abs().max()


def _redrawn(value: Any, seed: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return random_contents(value, Generators(seed))


def _sorted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim() or value.is_complex():
        return value
    return value.sort(dim=-1).values


def _constant(value: Any) -> Any:
    """Every element is the first one."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    return value.flatten()[:1].expand(value.numel()).reshape(value.shape).clone()


def _mask(value: Any, ones: str) -> Any:
    """Masks, which hold zeros and ones only, with ``ones`` everywhere, in few places, or nowhere."""
    if not isinstance(value, torch.Tensor) or value.is_complex() or not value.numel():
        return value
    if value.dtype is not torch.bool and not bool(((value == 0) | (value == 1)).all()):
        return value
    made = torch.full_like(value, ones == "all")
    if ones == "few":
        made.view(-1)[0] = 1
    return made


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "negated": _negated,
    "reversed": _reversed,
    "one less": _one_less,
    "an eighth": partial(_scaled, by=1 / 8),
    "eightfold": partial(_scaled, by=8.0),
    "halved": partial(_scaled, by=1 / 2),
    "doubled": partial(_scaled, by=2.0),
    "zeros": partial(_scaled, by=0.0),
    "shifted": _shifted,
    "drawn": partial(_redrawn, seed=0),
    "drawn again": partial(_redrawn, seed=1),
    "sorted": _sorted,
    "constant": _constant,
    "all ones": partial(_mask, ones="all"),
    "few ones": partial(_mask, ones="few"),
    "no ones": partial(_mask, ones="none"),
}
_FIRST = ("negated", "reversed", "one less")
_FIRST_OF_SLOW = ("negated", "one less")
_FURTHER = tuple(name for name in _CHANGES if name not in _FIRST)
"""Tried only for a model that decides on elements."""


def _first_run(
    original: ReferenceModel, call: CallSignature, sample: Sample, index: int
) -> tuple[Any, Answer]:
    try:
        output, answer = seeded(lambda: original.first(sample))
    except NotTensors:
        raise  # the model itself runs
    except MODEL_ERRORS as error:
        raise InputError(
            f"inputs: the model does not run on sample {index} ({describe(call.names, sample)}): {told(error)}"
        ) from error
    expect_dense(output)
    return output, answer

# SPDX-License-Identifier: Apache-2.0
"""Find dimensions that a trace takes for one, although the model lets them differ.

    mask (2, 7), keys (2, 4, 7, 8): the model also ran with a mask of 10, and there the trace is wrong

Both were 7 in the samples, and where both became 10 the trace was right: so it is right wherever they are
equal, which can be checked at every call.
"""

from collections.abc import Sequence

from blade.capture.derived_shapes import Axis, axes_of, by_position
from blade.capture.references import ReferenceRuns
from blade.core.captured import EqualSizes, Reference


def find_tied_dimensions(
    seen: ReferenceRuns, wrong: Sequence[Reference]
) -> tuple[tuple[frozenset[Axis], ...], tuple[EqualSizes, ...]]:
    """Return classes of dimensions to vary together only, and the checks to add; empty if that cannot help.

    ``wrong`` are the references at which the trace differs.
    """
    sizes = axes_of(seen.samples[0])
    right = {one.axes for one in seen.references} - {one.axes for one in wrong}
    wholes = [axes for axes in right if len({sizes[axis] for axis in axes}) == 1]
    classes: dict[frozenset[Axis], None] = {}
    for one in sorted(wrong, key=lambda one: len(one.axes)):
        if any(one.axes & found for found in classes):
            continue
        around = [whole for whole in wholes if one.axes < whole]
        if not one.axes or not around:
            return (), ()
        classes[min(around, key=len)] = None
    return tuple(classes), tuple(tie for axes in classes for tie in _equal_sizes(axes))


def _equal_sizes(axes: frozenset[Axis]) -> list[EqualSizes]:
    """Return one pair per position: the other dimensions always equal their representative."""
    first, *others = (min(part) for part in by_position(axes))
    return [EqualSizes(first, other) for other in others]

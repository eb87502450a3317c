# SPDX-License-Identifier: Apache-2.0
"""Which dimensions a trace takes for one, although the model lets them differ.

    mask (2, 7), keys (2, 4, 7, 8): the model also ran with a mask of 10, and there the trace is wrong

Both were 7 in the samples, and where both became 10 the trace was right: so it is right wherever they
are equal, which can be checked at every call.
"""

from collections.abc import Sequence

from blade.capture.captured import Reference, Tie
from blade.capture.observe import Observed
from blade.capture.probes import Axis, axes_of, by_position


def find_ties(
    seen: Observed, wrong: Sequence[Reference]
) -> tuple[tuple[frozenset[Axis], ...], tuple[Tie, ...]]:
    """Classes of dimensions to vary together only, and what to check; empty if that cannot help.

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
    return tuple(classes), tuple(tie for axes in classes for tie in _ties(axes))


def _ties(axes: frozenset[Axis]) -> list[Tie]:
    """One representative per position is enough: the others were never seen to differ from it."""
    first, *others = (min(part) for part in by_position(axes))
    return [Tie(first, other) for other in others]

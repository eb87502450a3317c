# SPDX-License-Identifier: Apache-2.0
"""Measure the outputs of an engine at one case, one by one: their form first, then their errors.

    found = measure(case, got, outputs_at(case, original), truth, known)
    found.answers, found.layouts

In training the outputs are all that forward saves, in each of two answers. So the original's may come as they are
computed, and both are let go of where they are near.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.core.reason import Code
from blade.errors import Refused
from blade.verification import compare, tolerance
from blade.verification.cases import Case
from blade.verification.check_errors import Answer, describe_case
from blade.verification.copies import copied, layout_of
from blade.verification.each_guarded import each_guarded
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.index_guard import in_bounds
from blade.verification.original import Outputs, are_finite

Tensors = Sequence[torch.Tensor]
PEERS = 8  # the most outputs that a small one is compared with, where all of them are near
_LET_GO = torch.empty(0)
_LARGE = 1 << 20  # bytes of an output that is let go of as soon as it is found near


@dataclass(frozen=True)
class Measured:
    """``layouts``: sizes and strides of the original's outputs, without their memory."""

    answers: list[Answer]
    layouts: list[torch.Tensor]


def measure(
    case: Case,
    got: list[torch.Tensor],
    wants: Outputs,
    truth: Fp64Reference,
    known: Sequence[float] = (),
    hurry: bool = False,
    only: Sequence[int] | None = None,
    choices: Collection[int] = (),
    like: Tensors = (),
) -> Measured:
    """Return the errors at ``case``, ``only`` those of these outputs; raise where an output has another form.

    ``got`` lets go of what is measured. ``wants``: the original's outputs. ``known``: the original's own errors at
    the first case, one per output.

    An output that is as near to the original as the original is to the fp64 reference, plus rounding, is
    within twice that of the reference (the triangle inequality). This is the tolerance, so fp64 is not run.
    ``hurry``: fp64 is not run either, output by output, where the difference to the original is within
    rounding alone. ``choices``: outputs whose error is the share that differs (``saved_choices``). ``like``: as in
    ``compare.why_other_form``.
    """
    if len(got) != len(wants):
        raise _refused(case, f"it returned {len(got)} tensors and the original {len(wants)}")
    outputs = range(len(got)) if only is None else only
    may_be_near = known or [0.0] * len(got) if known or hurry else ()
    want: dict[int, torch.Tensor] = {}
    near: dict[int, Answer] = {}
    layouts: dict[int, torch.Tensor] = {}
    unlike: list[int] = []
    scale = 0.0
    for i, tensor in wants:
        layouts[i] = layout_of(tensor)
        want[i] = tensor
        if _why_other_form(case, i, got[i], tensor, like):
            unlike.append(i)
        elif i in outputs and may_be_near:
            near.update(_near(case, i, got[i], tensor, may_be_near[i]))
        is_measured = i not in outputs or (hurry and i in near and tensor.nbytes >= _LARGE)
        if is_measured and i not in unlike:
            scale = max(scale, _magnitude(tensor))
            got[i] = _LET_GO
            del want[i]
        del tensor  # the next one is computed meanwhile
    _check_unlike(case, sorted(unlike), got, want, truth, like)
    ordered = [layouts[i] for i in range(len(got))]
    if len(near) == len(outputs):
        return Measured([near[i] for i in outputs], ordered)
    far = _in_question(want, near, outputs) if hurry else list(outputs)
    scale = max(scale, *map(_magnitude, want.values()))
    half = tolerance.narrowest(truth.graph)

    def measured(i: int, t: torch.Tensor | None) -> Answer:
        mine, theirs = got[i], want.pop(i)
        errors = tolerance.errors(mine, theirs, t, scale, half)
        found = Answer(case, i, theirs.dtype, errors, half=half, **_smallness(theirs))
        if i in choices and errors.error:
            share = tolerance.share_apart(mine, theirs)
            found = replace(found, errors=replace(errors, error=share), is_choice=True)
        got[i] = _LET_GO
        return found

    for i in set(want).difference(far):
        got[i] = _LET_GO
        del want[i]
    for k, t in fp64_outputs(case, truth.of(far)):
        near[far[k]] = measured(far[k], t)
    near.update({i: measured(i, None) for i in far if i in want})
    return Measured([near[i] for i in outputs], ordered)


def known_errors(answers: Sequence[Answer]) -> list[float]:
    """Return the original's own errors at the one case of ``answers``; empty without an fp64 reference."""
    own = [a.errors.original_fp64 for a in answers]
    exact = [not (a.dtype.is_floating_point or a.dtype.is_complex) for a in answers]
    if any(e is None and not whole for e, whole in zip(own, exact, strict=True)):
        return []
    return [e or 0.0 for e in own]


def fp64_reference(case: Case, truth: Fp64Reference) -> Tensors | None:
    """Return the outputs in fp64, where indices computed from floats may differ; ``None`` where an op raises."""
    found = dict(fp64_outputs(case, truth))
    return [found[k] for k in range(len(found))] if len(found) == truth.count else None


def fp64_outputs(case: Case, truth: Fp64Reference) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the outputs in fp64 by number, as they are computed; nothing from an op on that raises."""
    if (known := truth.known(case.inputs)) is not None:
        yield from enumerate(known)
        return
    inputs = tuple(map(copied, case.inputs)) if truth.writes else case.inputs
    yield from each_guarded(case, truth.each(inputs), in_bounds)


def _why_other_form(
    case: Case, i: int, got: torch.Tensor, want: torch.Tensor, like: Tensors, **how: Any
) -> str | None:
    """A sentence on how output ``i`` differs in form, if it does.

    Torch may choose other layouts at other sizes than at the first sample (``like``), by the meaningless stride of an
    axis of size 1 or by the size of a convolution. A view that works on the first sample's result works on one with the
    same layout.
    """
    # Engines read inputs as if contiguous, and their outputs' strides follow: this is right for a layout
    # that the model was not sampled with.
    strides = case.kind != "layout"
    return compare.why_other_output(i, got, want, strides, like=like[i] if like else None, **how)


def _check_unlike(
    case: Case,
    unlike: Sequence[int],
    got: Tensors,
    want: Mapping[int, torch.Tensor],
    truth: Fp64Reference,
    like: Tensors,
) -> None:
    """Raise unless the fp64 reference has the form of each output ``unlike`` the original."""
    if not unlike:
        return
    found = dict(fp64_outputs(case, truth.of(unlike)))
    finite = are_finite(case.inputs)
    for k, i in enumerate(unlike):
        there = found[k] if len(found) == len(unlike) else None
        if sentence := _why_other_form(
            case, i, got[i], want[i], like, truth=there, overflows=finite
        ):
            raise _refused(case, sentence)


def _refused(case: Case, sentence: str) -> Refused:
    return Refused(Code.WRONG_VALUES, f"at {describe_case(case)} {sentence}.")


def _near(
    case: Case, i: int, got: torch.Tensor, want: torch.Tensor, own: float
) -> dict[int, Answer]:
    """Output ``i`` by number, if it is so near to the original that the original's ``own`` error proves it right."""
    errors = tolerance.errors(got, want, None)
    if errors.error > tolerance.allowed(want.dtype, own) - own:
        return {}
    return {i: Answer(case, i, want.dtype, errors, is_near=True, **_smallness(want))}


def _magnitude(want: torch.Tensor) -> float:
    return tolerance.magnitude(want) if want.is_floating_point() else 0.0


def _smallness(want: torch.Tensor) -> dict[str, Any]:
    """Whether an output is of few elements, and then its magnitude."""
    if want.numel() > tolerance.FEW or not want.is_floating_point():
        return {}
    return {"is_small": True, "magnitude": tolerance.magnitude(want)}


def _in_question(
    want: Mapping[int, torch.Tensor], near: Collection[int], outputs: Sequence[int]
) -> list[int]:
    """Return the outputs that are not near, and, for small ones among them, some others to compare with."""
    far = [i for i in outputs if i not in near]
    if all(want[i].numel() > tolerance.FEW for i in far):
        return far
    held = (i for i in near if i in want and want[i].is_floating_point())
    others = sorted(held, key=lambda i: want[i].numel())
    return sorted([*far, *others[:PEERS]])

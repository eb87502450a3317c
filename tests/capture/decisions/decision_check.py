# SPDX-License-Identifier: Apache-2.0
"""Optimize a row's model, call it at inputs that were not sampled, and judge every answer.

    score = judge(row, python_fallback=False, is_loaded=True)
    score.failures                  # texts; there may be none
    score.paths, score.fallback, score.raised

An answer is right if it is the original's (number, shapes and dtypes of its tensors, and their values within
``Tolerance.graph`` of them), and the arguments are left as the original leaves them. A
RuntimeError that names the file and line of a decision is an answer, too, if it leaves the arguments alone;
so is any exception where the original raises.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any
from unittest import mock

import torch
from decision_table import Inputs, Row
from saved import loaded
from torch import nn

import blade
from blade.errors import BladeWarning
from blade.verification.tolerance import distance, tolerance_of

_PLACE = re.compile(r"([\w.-]+\.py):(\d+)")


@dataclass
class Score:
    """What became of the calls of one row.

    ``refused``: the ``InputError`` of ``optimize``; ``crashed``: what else it raised, or loading did.
    ``sample_paths``: samples that a path answered; ``sample_raised``: that raised with the place of a decision;
    ``at_samples``: what is wrong there. The others are of the
    calls: answered by a path, answered by the original in Python, raised with the place of a decision, raised
    like the original, answered wrongly, raised in another way.
    """

    refused: str = ""
    crashed: str = ""
    sample_paths: int = 0
    sample_raised: int = 0
    at_samples: list[str] = field(default_factory=list)
    paths: int = 0
    fallback: int = 0
    raised: int = 0
    both_raise: int = 0
    wrong: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [*filter(None, [self.crashed]), *self.at_samples, *self.wrong, *self.unnamed]


def config(**fields: Any) -> blade.Config:
    """The fields that ``Config`` has: ``python_fallback`` and ``max_paths`` are new ones."""
    known = {name: value for name, value in fields.items() if name in blade.Config.model_fields}
    return blade.Config(timing=False, min_cluster_size=1, **known)


def judge(
    row: Row,
    *,
    python_fallback: bool = True,
    is_loaded: bool = False,
    is_traced: bool = False,
    samples_may_raise: bool = False,
) -> Score:
    """Optimize ``row.make()`` at its sample and make its calls.

    ``is_loaded``: save and load it before. ``is_traced``: capture may not script it, as it cannot most models.
    """
    score = Score()
    model = row.make()
    try:
        optimized = optimize(row, python_fallback, is_traced)
        optimized = loaded(optimized) if is_loaded else optimized
    except blade.InputError as error:
        score.refused = str(error)
        return score
    except Exception as error:
        score.crashed = f"{type(error).__name__}: {str(error)[:2000]}"
        return score
    model = _judge_samples(score, row, model, optimized, samples_may_raise)
    may_raise = is_loaded or not python_fallback
    for inputs in row.calls():
        model = _judge_call(score, row, model, optimized, inputs, may_raise)
    return score


def _judge_samples(
    score: Score, row: Row, model: nn.Module, optimized: nn.Module, may_raise: bool
) -> nn.Module:
    """Call at the samples, at which a path has to answer unless it ``may_raise``."""
    samples = row.first()
    there = Score()
    for inputs in samples if isinstance(samples, list) else [samples]:
        model = _judge_call(there, row, model, optimized, inputs, may_raise)
    score.sample_paths, score.sample_raised = there.paths, there.raised
    score.at_samples = [f"at a sample: {why}" for why in there.failures]
    return model


def optimize(row: Row, python_fallback: bool, is_traced: bool) -> torch.jit.ScriptModule:
    fields: dict[str, Any] = {"allow_tracing": True} if is_traced else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BladeWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return blade.optimize(
            row.make(), row.first(), config(python_fallback=python_fallback, **fields)
        )


@dataclass(frozen=True)
class Call:
    """What a call returned or raised, and what it left of its arguments."""

    answer: Any
    error: Exception | None
    inputs: Inputs


def call(module: Callable[..., Any], inputs: Inputs) -> Call:
    own = copy.deepcopy(inputs)
    answer, error = None, None
    with torch.no_grad():
        try:
            answer = module(**own) if isinstance(own, Mapping) else module(*own)
        except Exception as raised:
            error = raised
    return Call(copy.deepcopy(answer), error, own)


def _judge_call(
    score: Score, row: Row, model: nn.Module, optimized: nn.Module, inputs: Inputs, may_raise: bool
) -> nn.Module:
    """Add one call to ``score``; return the model in the state that the call left."""
    after = copy.deepcopy(model)
    want = call(after, inputs)
    with _python_calls(type(model)) as python:
        got = call(optimized, inputs)
    if want.error is not None:
        if got.error is None:
            score.wrong.append(f"answers where the original raises {want.error!r}")
        score.both_raise += got.error is not None
        return after
    if got.error is not None:
        why = _why_no_refusal(got, row, inputs, may_raise)
        score.unnamed += [why] if why else []
        score.raised += not why
        return model
    if why := why_differs(got, want):
        score.wrong.append(why)
    elif python:
        score.fallback += 1
    else:
        score.paths += 1
    return after


def _why_no_refusal(got: Call, row: Row, inputs: Inputs, may_raise: bool) -> str:
    """Why an exception is no allowed answer."""
    text = str(got.error)
    if "Declaration: forward(" in text or "containers have to hold the same" in text:
        return ""  # no TorchScript module takes such arguments; the text names them
    if not may_raise and "returns always as many" not in text:
        return f"raises although the original could answer: {text[-300:]}"
    if not isinstance(got.error, RuntimeError):
        return f"raises {type(got.error).__name__}: {text[-300:]}"
    forward = row.model.forward.__code__.co_firstlineno  # where an argument that decides is
    places = {(f"{row.theme}.py", str(line)) for line in (*row.marked_lines(), forward)}
    if places.isdisjoint(_PLACE.findall(text)):
        return f"raises without the place of a decision: {text[-300:]}"
    if _apart(leaves_of(got.inputs), leaves_of(inputs), exact=True):
        return "raises after it wrote to its arguments"
    return ""


def why_differs(got: Call, want: Call) -> str:
    """How an answer, or what it left of the arguments, differs from the original's."""
    if why := _apart(leaves_of(got.inputs), leaves_of(want.inputs)):
        return f"arguments: {why}"
    return _apart(leaves_of(got.answer), leaves_of(want.answer))


def leaves_of(value: Any) -> list[torch.Tensor]:
    """Tensors and numbers in ``value`` in order; ``None`` and texts are dropped."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (bool, int, float, complex)):
        return [torch.tensor(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves_of(item)]
    assert value is None or isinstance(value, str), type(value)
    return []


def _apart(got: list[torch.Tensor], want: list[torch.Tensor], exact: bool = False) -> str:
    """How two lists of tensors differ; "" if they do not."""
    if len(got) != len(want):
        return f"{len(got)} tensors, not {len(want)}"
    for a, b in zip(got, want):
        if a.shape != b.shape or a.dtype != b.dtype:
            form = f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
            return form.replace("torch.", "")
        limit = 0.0 if exact or not b.is_floating_point() else tolerance_of(b.dtype).graph
        if _has_other_nonfinite(a, b):
            return "another NaN or inf"
        if not (error := distance(a, b)) <= limit:
            return f"error {error:.2g}"
    return ""


def _has_other_nonfinite(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not b.is_floating_point():
        return False
    mine, theirs = (torch.where(x.isfinite(), 0.0, x) for x in (a, b))
    return not torch.equal(mine.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0))


@contextmanager
def _python_calls(model: type[nn.Module]) -> Iterator[list[None]]:
    """A list that grows with each call of the Python ``forward`` of ``model``."""
    seen: list[None] = []
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(None)
        return forward(*args, **kwargs)

    with mock.patch.object(model, "forward", counted):
        yield seen

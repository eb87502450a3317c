# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table, compiled once and run at many shapes, against eager torch.

An answer may be off by twice what eager itself is off from a computation in float64, plus a few units
in the last place. Where eager raises, the engine gives no answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from op_samples import TABLE as SAMPLES
from op_samples import Sample, inputs
from op_trace import ops_of, trace
from torch.utils._pytree import tree_leaves

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.cpu.target import host
from blade.backends.disc.interpret_ir import interpret
from blade.backends.disc.ir import Graph
from blade.backends.disc.lower import lower
from blade.backends.disc.ops.table import TABLE
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

USUAL = {"a": 3, "b": 5, "c": 4, "d": 6}
ODD = {"a": 7, "b": 37, "c": 9, "d": 13}
SPECIAL = {"a": 11, "b": 13, "c": 3, "d": 2}
Outputs = list[torch.Tensor]


def sizes_of(sample: Sample) -> Iterator[dict[str, int]]:
    """The sample's sizes, then odd, smallest, and mixed ones."""
    letters = sorted({a for s in sample.specs for a in s.axes if a.isalpha()})
    usual = {a: (sample.sizes or {}).get(a, USUAL[a]) for a in letters}
    yield usual
    yield {a: usual[a] * 2 + 1 if sample.sizes else ODD[a] for a in letters}
    yield dict.fromkeys(letters, 1)
    for letter in letters:
        yield {**usual, letter: 0}
        yield {**usual, letter: 1}


def eager(sample: Sample, tensors: Sequence[torch.Tensor]) -> Outputs | None:
    """What torch gives; ``None`` where it raises."""
    try:
        with torch.no_grad():
            return [t for t in tree_leaves(sample.function(*tensors)) if t is not None]
    except (RuntimeError, IndexError, ValueError, AssertionError, TypeError):
        return None


def exact(sample: Sample, tensors: Sequence[torch.Tensor]) -> Outputs:
    return eager(sample, [t.double() if t.is_floating_point() else t for t in tensors]) or []


def different(got: Outputs, want: Outputs, ideal: Outputs) -> str:
    """Empty, or how ``got`` differs from eager by more than eager's own rounding."""
    if len(got) != len(want):
        return f"{len(got)} results, eager has {len(want)}"
    ideal = ideal if [i.shape for i in ideal] == [w.shape for w in want] else want
    found = (one(*t) for t in zip(got, want, ideal, strict=True))
    return "; ".join(f"result {k}: {text}" for k, text in enumerate(found) if text)


def one(got: torch.Tensor, want: torch.Tensor, ideal: torch.Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, eager has {want.dtype}{list(want.shape)}"
    if not want.dtype.is_floating_point:
        return "" if torch.equal(got, want) else f"{off(got != want, got, want)}"
    if (got.isnan() != want.isnan()).any():
        return "NaN: " + off(got.isnan() != want.isnan(), got, want)
    equal = (got == want) | (got.isnan() & want.isnan())
    ideal = ideal.double()
    own = (want.double() - ideal).abs()
    own = max(own[own.isfinite()].tolist(), default=0.0)
    info = torch.finfo(want.dtype)
    if want.dtype == torch.float64:  # there is no better reference to measure eager by
        own = 8 * info.eps * max([1.0, *ideal[ideal.isfinite()].abs().flatten().tolist()])
    allowed = 2 * own + 8 * info.eps * ideal.abs() + 8 * info.tiny
    wrong = ~equal & ~((got.double() - ideal).abs() <= allowed)
    wrong |= ~equal & (got.isinf() | want.isinf())
    return off(wrong, got, want) if wrong.any() else ""


def off(where: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    place = where.nonzero()[0].tolist()
    return f"at {place} {got[tuple(place)].item()!r}, eager {want[tuple(place)].item()!r}"


def check(sample: Sample) -> tuple[Graph, list[str]]:
    sizes = list(sizes_of(sample))
    first = inputs(sample, sizes[0])
    gm, shape_env = trace(sample.function, first, [s.dynamic() for s in sample.specs])
    graph = lower(gm, shape_env)
    compiled = compile_ir(graph, host())
    engine = make_engine(
        sample.name, "disc", compiled.program, compiled.object, list(compiled.constants), {}
    )
    assert not engine.why_unavailable(), engine.why_unavailable()
    wrong = []
    runs = [(s, False) for s in sizes]
    runs += [({**SPECIAL, **s}, True) for s in [sample.sizes or {}] if sample.special]
    for size, special in runs:
        tensors = inputs(sample, size, special)
        want = eager(sample, tensors)
        got = engine.try_execute(tensors)
        engine.rearm()
        if got is None:
            text = engine.last_error() or str(engine.stats())
            expected = want is None or min(size.values(), default=2) <= sample.refuses
            text = "" if expected else f"no answer: {text[:300]}"
        elif want is None:
            text = "answers where eager raises"
        else:
            ideal = exact(sample, tensors)
            text = different(got, want, ideal)
            reference = different(interpret(graph, tensors), want, ideal)
            text += f" | interpreter: {reference}" if reference else ""
        if text:
            wrong.append(f"{size}{' special' * special}: {text}")
    return graph, wrong


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_answers_are_eagers(sample: Sample) -> None:
    graph, wrong = check(sample)
    assert not wrong, "\n".join(wrong)
    calls = [v for v in graph.values if v.op == "call"]
    assert sample.called == bool(calls), "\n".join(map(str, calls)) or graph


def test_every_row_has_a_sample() -> None:
    seen: set[Any] = set()
    for sample in SAMPLES:
        seen |= ops_of(sample.function, inputs(sample, next(sizes_of(sample))))
    assert sorted(map(str, set(TABLE) - seen)) == []

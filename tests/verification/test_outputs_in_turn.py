# SPDX-License-Identifier: Apache-2.0
"""Outputs that are compared as the original computes them, as in training: the same verdicts, in less memory."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_backends import (
    Fault,
    PythonEngine,
    produces,
    puts_nan,
    raises,
    right,
    too_many,
    wrong_dtype,
    wrong_shape,
    wrong_values,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from verified import cluster

from blade.core.reason import Code, Reason
from blade.graph.fx.interpreter import OutputsInTurn, Schedule, without_outputs
from blade.report import Verdict
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.original import InTurn
from blade.verification.verify import verify

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(0)
DEEP = 6


class Saves(torch.nn.Module):
    """Returns what each of its layers computes, the last one first, and one of them twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(DEEP):
            x = aten.sin.default(aten.mul.Scalar(x, 3.0))
            results.append(x)
        return (*reversed(results), results[2], aten.amax.default(x))


def in_turn(gm: torch.fx.GraphModule) -> InTurn:
    return lambda *inputs: OutputsInTurn(gm).each(inputs)


def both(module: torch.nn.Module, x: torch.Tensor, fault: Fault) -> list[Verdict | Reason]:
    """The verdict on all outputs at once, and in turn; of one sample alone, as in training."""
    of = cluster(module, [x])
    found = []
    for each in (None, in_turn(of.gm)):
        engine = PythonEngine(of.gm, run=fault)
        found.append(verify(of, engine, of.gm, "fake", derived=False, seconds=1.0, each=each))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("size", [4, 1024])  # 1024: outputs of 4 MiB
@pytest.mark.parametrize(
    "fault", [right, wrong_values, puts_nan, wrong_shape, wrong_dtype, too_many, raises]
)
def test_the_verdict_is_the_same(fault: Fault, size: int) -> None:
    whole, other = both(Saves(), torch.randn(size, size, generator=RNG), fault)
    assert isinstance(whole, Verdict) is (fault is right)
    assert whole == other


@produces(Code.WRONG_VALUES)
@pytest.mark.parametrize("output", range(DEEP + 2))
def test_each_output_is_compared(output: int) -> None:
    def fault(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        return [t * 1.01 if i == output else t for i, t in enumerate(outputs)]

    whole, other = both(Saves(), torch.randn(600, 600, generator=RNG), fault)
    assert isinstance(other, Reason) and other.code is Code.WRONG_VALUES
    assert f"output {output} is" in other.detail
    assert whole == other


def test_what_is_compared_is_freed() -> None:
    theirs: list[weakref.ref[torch.Tensor]] = []
    ours: list[weakref.ref[torch.Tensor]] = []
    alive: list[tuple[int, int]] = []

    def count(refs: list[weakref.ref[torch.Tensor]]) -> int:
        return sum(one() is not None for one in refs)

    def each(*inputs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        theirs.clear()
        for number, output in OutputsInTurn(of.gm).each(inputs):
            theirs.append(weakref.ref(output))
            yield number, output
            del output
            alive.append((count(theirs), count(ours)))

    def run(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        copies = [t.clone() for t in outputs]
        if call == 1:  # the others are of ``check_fresh``
            ours.extend(map(weakref.ref, copies))
        return copies

    of = cluster(Saves(), [torch.randn(600, 600, generator=RNG)])
    engine = PythonEngine(of.gm, run=run)
    found = verify(of, engine, of.gm, "fake", derived=False, seconds=1.0, each=each)  # type: ignore[arg-type]
    assert isinstance(found, Verdict)
    before, compared = alive[: DEEP + 2], alive[DEEP + 2 :]
    assert max(mine for mine, _ in before + compared) <= 2  # the next one is computed from it
    assert compared[-1][1] < DEEP / 2 < max(held for _, held in alive)


def test_where_the_original_raises_no_engine_may_answer() -> None:
    class Raises(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return aten.neg.default(x), aten.view.default(x, [7])

    def answers(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        return outputs

    of = cluster(Raises(), [torch.randn(3, 4, generator=RNG)])
    engine = PythonEngine(cluster(Saves(), of.samples[0]).gm, run=answers)
    each = in_turn(of.gm)
    found = verify(of, engine, of.gm, "fake", derived=False, seconds=1.0, each=each)  # type: ignore[arg-type]
    assert isinstance(found, Reason)
    assert "gave an answer where the original raises" in found.detail


def test_random_numbers_are_the_same_in_both_runs() -> None:
    def drops(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dropped, mask = aten.native_dropout.default(x, 0.5, True)
        return dropped, mask, aten.native_dropout.default(dropped, 0.5, True)[0]

    with FakeTensorMode():
        gm = make_fx(drops)(torch.empty(64, 64))
    for found in both(gm, torch.randn(64, 64, generator=RNG), right):
        assert isinstance(found, Verdict), found


def test_views_that_only_the_output_uses_do_not_keep_what_they_view() -> None:
    class SavesViews(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = []
            for _ in range(DEEP):
                x = aten.sin.default(aten.mul.Scalar(x, 3.0))
                results.append(x)
            return (x, *(aten.t.default(one) for one in results))  # after all else

    gm = torch.fx.symbolic_trace(SavesViews())
    x = torch.randn(3, 4, generator=RNG)
    want = gm(x)
    alive: list[weakref.ref[Any]] = []
    for number, output in OutputsInTurn(gm).each((x,)):
        assert torch.equal(output, want[number])
        alive.append(weakref.ref(output.untyped_storage()))
        del output
        assert sum(ref() is not None for ref in alive) <= 2
    assert len(alive) == DEEP + 1


def test_what_draws_keeps_its_place() -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = aten.add.Tensor(x, aten.rand_like.default(x))
        z = aten.rand_like.default(y)
        return aten.rand_like.default(x), y, z

    with FakeTensorMode():
        gm = make_fx(draws)(torch.empty(3, 4))
    kinds = [node.target for node in Schedule(gm.graph).nodes]
    assert kinds == [node.target for node in gm.graph.nodes][:-1]


class Counts(torch.nn.Module):
    """Adds its mean to an input, as batch norm does, and returns a view of that input, too."""

    def forward(self, x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = aten.view.default(mean, [1, -1])
        fresh = aten.sub.Tensor(x, view)
        aten.copy_.default(mean, aten.add.Tensor(mean, aten.mean.dim(x, [0])))
        return view, fresh, aten.neg.default(view)


@pytest.mark.parametrize("module", [OutputsInTurn, Fp64Reference])
def test_an_output_that_lies_in_a_written_input_comes_last(module: type) -> None:
    gm = torch.fx.symbolic_trace(Counts())
    x, mean = torch.randn(5, 4, generator=RNG), torch.randn(4, generator=RNG)
    want = gm(x, after := mean.clone())
    inputs = (x, mean.clone())
    found = dict(module(gm).each(inputs))
    assert list(found) == [1, 2, 0]
    for number, output in found.items():
        torch.testing.assert_close(output.float(), want[number])
    assert torch.equal(inputs[1], after if module is OutputsInTurn else mean)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_new_contents_of_inputs_are_compared(wrong: int | None) -> None:
    def run(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        if wrong == 3:
            inputs[1].mul_(1.01)
        return [t * 1.01 if i == wrong else t for i, t in enumerate(outputs)]

    x, mean = torch.randn(5, 4, generator=RNG), torch.randn(4, generator=RNG)
    of = replace(cluster(Counts(), [x]), samples=[(x, mean)], updates=(1,))
    found = []
    for each in (None, in_turn(of.gm)):
        before = mean.clone()
        engine = PythonEngine(of.gm, run=run)
        found.append(verify(of, engine, of.gm, "fake", derived=False, seconds=1.0, each=each))  # type: ignore[arg-type]
        assert torch.equal(mean, before)
    assert isinstance(found[0], Verdict) is (wrong is None)
    assert found[0] == found[1]


def test_outputs_that_are_far_are_computed_again() -> None:
    """Both are held for one output at a time, whatever the engine's rounding."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def each(*inputs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        nonlocal most
        for number, output in OutputsInTurn(of.gm).each(inputs):
            alive.append(weakref.ref(output))
            yield number, output
            del output
            most = max(most, sum(one() is not None for one in alive))

    def off(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        return [t * (1 + 2e-6) for t in outputs]

    of = cluster(Saves(), [torch.randn(600, 600, generator=RNG)])
    engine = PythonEngine(of.gm, run=off)
    found = verify(of, engine, of.gm, "fake", derived=False, seconds=1.0, each=each)  # type: ignore[arg-type]
    assert isinstance(found, Reason), found
    assert len(alive) >= 3 * (DEEP + 2)
    assert most <= 3


def test_alone_it_computes_all_and_holds_nothing() -> None:
    gm = torch.fx.symbolic_trace(Counts())
    x, mean = torch.randn(5, 4, generator=RNG), torch.randn(4, generator=RNG)
    gm(x, after := mean.clone())
    assert without_outputs(gm)(x, mean) == ()
    assert torch.equal(mean, after)
    assert len(gm(x, mean)) == 3

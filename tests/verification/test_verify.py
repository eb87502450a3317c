# SPDX-License-Identifier: Apache-2.0
"""verify: right engines pass, and each way of being wrong is found and named with its numbers."""

import json
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
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
    writes_its_input,
    wrong_dtype,
    wrong_shape,
    wrong_values,
)
from verified import cluster, remembering, run

import blade
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.errors import EngineError
from blade.report import Verdict
from blade.verification import verify as verify_module
from blade.verification.cases import Case
from blade.verification.check_errors import Answer
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.tolerance import RelativeErrors
from blade.verification.verify import verify

aten = torch.ops.aten


class Softmax(torch.nn.Module):
    """Written in ATen, as extraction writes it; a weight makes it fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(16, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.softmax.int(aten.mul.Tensor(x, self.const_0), -1),)


class Selection(torch.nn.Module):
    """The elements above 0.5; sizes are made up by hand, as extraction finds them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.index.Tensor(x, [aten.gt.Scalar(x, 0.5)]),)


def selection(*samples: torch.Tensor) -> Cluster:
    of = cluster(Selection(), samples)
    of.shape_env.create_unbacked_symint()
    return of


class Lookup(torch.nn.Module):
    """Ints in: a row per index, and which indices are the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.embedding.default(self.const_0, i), aten.eq.Scalar(i, 7)


RNG = torch.Generator().manual_seed(0)
FLOATS = cluster(
    Softmax(),
    [torch.randn(3, 16, generator=RNG)],
    [torch.randn(7, 16, generator=RNG), torch.randn(5, 16, generator=RNG)],
)
INTS = cluster(Lookup(), [torch.tensor([[1, 2, 3, 7]])], [torch.tensor([[1, 0, 3], [7, 6, 5]])])


@pytest.mark.parametrize("of", [FLOATS, INTS])
def test_a_right_engine_passes_everywhere(of: Cluster) -> None:
    verdict = run(of)
    assert isinstance(verdict, Verdict)
    assert verdict.refused == 0
    assert verdict.checked >= 6
    assert verdict.error == 0.0
    assert verdict.error_fp64 == verdict.original_error_fp64
    assert verdict.error_fp64 is not None
    assert 0 <= verdict.error_fp64 < 1e-6


@produces(Code.WRONG_VALUES)
@pytest.mark.parametrize("of", [FLOATS, INTS])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (wrong_values, "from an fp64 run (relative to its largest magnitude)"),
        (puts_nan, "differs from the original in 1 places of NaN"),
        (wrong_shape, "output 0 has shape"),
        (wrong_dtype, "output 0 has dtype torch.float64 and the original's has torch.float32"),
        (too_many, "tensors and the original"),
        (writes_its_input, "it changed its input 0"),
    ],
)
def test_a_wrong_engine_is_refused_with_the_numbers(of: Cluster, fault: Fault, says: str) -> None:
    reason = run(of, run=fault)
    assert isinstance(reason, Reason)
    assert (reason.stage, reason.code) == (Stage.VERIFY, Code.WRONG_VALUES)
    assert (reason.backend, reason.subject) == ("fake", "cluster_0")
    assert reason.detail.startswith("at sample 0 (")
    assert says in reason.detail


def test_a_write_to_an_input_that_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "blade.verification.verify._lent", lambda inputs, updates: frozenset(range(len(inputs)))
    )
    assert isinstance(run(FLOATS), Verdict)
    of = cluster(Softmax(), [FLOATS.samples[0][0].clone()], [torch.randn(7, 16)])
    with pytest.raises(EngineError, match=r"wrote to its input 0 .* at sample 0"):
        run(of, run=writes_its_input)
    first = of.samples[0][0].shape[0]
    of.samples[0][0].normal_()
    with pytest.raises(EngineError, match=r"wrote to its input 0 .* at probe 0"):
        run(of, run=only_at(lambda s: s[0] != first, writes_its_input))


def test_the_allowed_error_is_told() -> None:
    reason = run(FLOATS, run=wrong_values)
    assert isinstance(reason, Reason)
    assert "output 0 is 1.0e-03 from an fp64 run" in reason.detail
    assert "is allowed, the original's own error being" in reason.detail


def test_one_wrong_int_is_too_many() -> None:
    def off_by_one(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        outputs[1][0, -1] ^= True
        return outputs

    reason = run(INTS, run=off_by_one)
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES
    assert "output 1 is inf from the original" in reason.detail


def only_at(shape: Callable[[torch.Size], bool], fault: Fault) -> Fault:
    return lambda outputs, inputs, call: (
        fault(outputs, inputs, call) if shape(inputs[0].shape) else outputs
    )


@pytest.mark.parametrize(
    ("where", "at"),
    [
        (lambda s: s[0] == 7, "probe 0"),
        (lambda s: s[0] == 1, "size 1"),
    ],
)
def test_wrong_at_one_size_only_is_found(where: Callable[[torch.Size], bool], at: str) -> None:
    reason = run(FLOATS, run=only_at(where, wrong_values))
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES
    assert f"at {at} (" in reason.detail


def test_an_engine_that_folded_the_sample_is_found() -> None:
    kept: list[list[torch.Tensor]] = []

    def folded(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        kept.append(outputs)
        return [t.clone() for t in kept[0]]

    reason = run(FLOATS, run=only_at(lambda shape: shape[0] == 3, folded))
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES
    assert "contents (3x16)" in reason.detail


def test_an_engine_that_ignores_strides_is_found() -> None:
    softmax = Softmax()

    def ignores(outputs: list[torch.Tensor], inputs: Any, call: int) -> Any:
        flat = inputs[0].as_strided(inputs[0].shape, (inputs[0].shape[1], 1))
        return softmax(flat)

    reason = run(FLOATS, run=ignores)
    assert isinstance(reason, Reason)
    assert "transposed layout" in reason.detail


@pytest.mark.parametrize("strides", [(16, 1), (1, 3), (0, 1), (40, 2)])
def test_of_a_part_of_something_large_a_copy_of_its_own_is_given(strides: tuple[int, int]) -> None:
    """What a graph saved for backward lies in one memory; its strides and where it begins stay."""
    large = torch.randn(1 << 16, generator=RNG)
    part = large.as_strided((3, 16), strides, 21)
    seen: list[torch.Tensor] = []

    assert isinstance(run(cluster(Softmax(), [part]), run=remembering(seen)), Verdict)
    given = seen[0]
    assert given.stride() == strides and given.storage_offset() == 21 % 16
    assert given.untyped_storage().nbytes() < 1000
    torch.testing.assert_close(given, part, rtol=0, atol=0)


def test_an_error_of_the_size_of_the_originals_own_is_allowed() -> None:
    def rounded_otherwise(outputs: list[torch.Tensor], inputs: Any, call: int) -> Any:
        return [torch.nextafter(o, o + 1) for o in outputs]

    verdict = run(FLOATS, run=rounded_otherwise)
    assert isinstance(verdict, Verdict)
    assert 0 < verdict.error < 1e-6


def test_declining_other_sizes_is_fine_and_counted() -> None:
    verdict = run(FLOATS, declines=lambda x: Code.GUARD_SHAPE if x[0].shape[0] == 1 else None)
    assert isinstance(verdict, Verdict)
    assert verdict.refused == 1


@produces(Code.GUARD_SHAPE)
def test_declining_the_users_own_sample_is_not() -> None:
    reason = run(FLOATS, declines=lambda x: Code.GUARD_SHAPE if x[0].shape[0] == 3 else None)
    assert isinstance(reason, Reason)
    assert (reason.stage, reason.code) == (Stage.VERIFY, Code.GUARD_SHAPE)
    assert reason.detail == (
        "it does not serve sample 0 (3x16), which is the user's own: guard_shape."
    )


def test_an_unavailable_engine_says_so() -> None:
    reason = run(FLOATS, declines=lambda x: Code.DISABLED, unavailable="It needs another CPU.")
    assert isinstance(reason, Reason)
    assert "It needs another CPU." in reason.detail


@produces(Code.ENGINE_RAISED)
@pytest.mark.parametrize("where", [lambda s: True, lambda s: s[0] == 1])
def test_raising_anywhere_is_refused_with_the_error(where: Callable[[torch.Size], bool]) -> None:
    reason = run(FLOATS, run=only_at(where, raises))
    assert isinstance(reason, Reason)
    assert (reason.stage, reason.code) == (Stage.VERIFY, Code.ENGINE_RAISED)
    assert "it raised: the device caught fire" in reason.detail


class AtLeastTwo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.relu.default(x),)


def test_answering_where_the_original_raises_is_wrong() -> None:
    def original(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise RuntimeError("one row is not enough")
        return torch.relu(x)

    of = cluster(AtLeastTwo(), [torch.randn(3, 4)], [torch.randn(5, 4)])
    reason = verify(of, PythonEngine(of.gm), original, "fake")  # type: ignore[arg-type]
    assert isinstance(reason, Reason)
    assert reason.code is Code.WRONG_VALUES
    assert reason.detail == "at size 1 (1x4) it gave an answer where the original raises."
    engine = PythonEngine(of.gm, right, lambda x: Code.GUARD_SHAPE if len(x[0]) == 1 else None)
    assert isinstance(verify(of, engine, original, "fake"), Verdict)  # type: ignore[arg-type]


def _only_fp32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise TypeError("fp32 only")
    return x * 1


torch.fx.wrap("_only_fp32")


class Unwidenable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (_only_fp32(x),)


def test_without_fp64_the_original_is_the_measure() -> None:
    def original(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    of = cluster(Unwidenable(), [torch.randn(3, 4)])
    assert isinstance(verify(of, PythonEngine(of.gm), original, "fake"), Verdict)  # type: ignore[arg-type]
    reason = verify(of, PythonEngine(of.gm, wrong_values), original, "fake")  # type: ignore[arg-type]
    assert isinstance(reason, Reason)
    assert "from the original (relative" in reason.detail
    assert "the original's own error being unknown" in reason.detail


@pytest.mark.parametrize(("fault", "runs_once"), [(right, True), (wrong_values, False)])
def test_fp64_runs_at_the_first_case_and_where_the_original_is_not_met(
    fault: Fault, runs_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    plain = Fp64Reference.each

    def counted(self: Fp64Reference, inputs: tuple[torch.Tensor, ...]) -> Any:
        runs.append(inputs)
        return plain(self, inputs)

    monkeypatch.setattr(Fp64Reference, "each", counted)
    verdict = run(FLOATS, run=fault)
    assert len(runs) == 1 if runs_once else len(runs) > 3
    assert isinstance(verdict, Verdict) is runs_once
    if isinstance(verdict, Verdict):
        assert verdict.checked > 1


@pytest.mark.parametrize(("fault", "runs"), [(right, 0), (wrong_values, 1)])
def test_in_a_hurry_fp64_runs_only_where_rounding_does_not_explain_it(
    fault: Fault, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = Fp64Reference.each

    def counted(self: Fp64Reference, inputs: tuple[torch.Tensor, ...]) -> Any:
        seen.append(inputs)
        return plain(self, inputs)

    monkeypatch.setattr(Fp64Reference, "each", counted)
    one = cluster(Softmax(), [torch.randn(3, 16, generator=RNG)])
    engine = PythonEngine(one.gm, run=fault)
    found = verify(one, engine, one.gm, "fake", seconds=0.0)  # type: ignore[arg-type]
    assert isinstance(found, Verdict) is (runs == 0)
    assert (len(seen) > 0) is (runs > 0)


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_in_a_hurry_much_memory_is_tried_as_it_is(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each derived case takes as much once more, and no process tries the original there."""
    tried = []
    monkeypatch.setattr(verify_module, "MANY_BYTES", most)
    monkeypatch.setattr(verify_module, "try_forked", lambda *of: tried.append(of))
    one = cluster(Softmax(), [torch.randn(3, 16, generator=RNG)])
    engine = PythonEngine(one.gm, run=right)
    found = verify(one, engine, one.gm, "fake", seconds=60.0)  # type: ignore[arg-type]
    assert isinstance(found, Verdict)
    assert (found.checked == 1, not tried) == (most == 0, most == 0)


class Dot(torch.nn.Module):
    """One sum of 4,096 numbers a row: how exact it comes out is luck, and one row has little of it."""

    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(4096, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.sum.dim_IntList(aten.mul.Tensor(x, self.const_0), [-1]),)


def in_another_order(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    products = inputs[0] * torch.randn(4096, generator=torch.Generator().manual_seed(1))
    return [products.unflatten(-1, (64, 64)).sum(-2).sum(-1)]


def a_little_off(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    return [o * (1 + 3e-6) for o in outputs]


@pytest.mark.parametrize("seed", [11, 62, 70])
def test_an_error_that_looks_large_beside_a_lucky_original_is_drawn_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(seed)
    of = cluster(
        Dot(), [torch.randn(1, 4096, generator=rng)], [torch.randn(2, 4096, generator=rng)]
    )
    assert isinstance(run(of, run=in_another_order), Verdict)
    wrong = run(of, run=a_little_off)  # about twice what is allowed, in every draw
    assert isinstance(wrong, Reason)
    assert "is allowed, the original's own error being" in wrong.detail
    monkeypatch.setattr("blade.verification.resample.DRAWS", 0)
    monkeypatch.setattr("blade.verification.conditioning.DRAWS", 0)
    once = run(of, run=in_another_order)
    assert isinstance(once, Reason)
    assert once.code is Code.WRONG_VALUES


class DotOf(torch.nn.Module):
    """The same of numbers near those that it knows; of others it is NaN."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.const_0, self.const_1 = Dot().const_0, known

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        away = aten.amax.default(aten.abs.default(aten.sub.Tensor(x, self.const_1)), [-1])
        dot = aten.sum.dim_IntList(aten.mul.Tensor(x, self.const_0), [-1])
        zero = aten.mul.Tensor(aten.log.default(aten.rsub.Scalar(away, 1)), 0.0)
        return (aten.add.Tensor(dot, zero),)


@pytest.mark.parametrize("seed", [11, 33, 62])
def test_contents_that_mean_nothing_when_drawn_are_moved(seed: int) -> None:
    sample = torch.randn(1, 4096, generator=torch.Generator().manual_seed(seed))
    of = cluster(DotOf(sample), [sample])

    def verdict(fault: Any) -> Verdict | Reason:
        engine = PythonEngine(of.gm, run=fault)
        return verify(of, engine, of.gm, "fake", derived=False)  # type: ignore[arg-type]

    assert isinstance(verdict(in_another_order), Verdict)
    wrong = verdict(a_little_off)
    assert isinstance(wrong, Reason)
    assert "is allowed, the original's own error being" in wrong.detail


def test_what_is_far_off_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("drawn again")

    monkeypatch.setattr("blade.verification.resample.random_contents", never)
    assert isinstance(run(FLOATS, run=wrong_values), Reason)


def test_fp64_computes_what_is_asked_alone() -> None:
    class Three(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = aten.exp.default(x)
            return y, aten.log.default(x), aten.sin.default(y)

    one = cluster(Three(), [torch.rand(3, 4, generator=RNG)])
    truth, x = Fp64Reference(one.gm), torch.rand(3, 4, generator=RNG)
    every = truth((x,))
    assert all(t.dtype == torch.float64 for t in every)
    ran: list[Any] = []
    part = truth.of([2, 0])
    part.call_function = lambda target, args, kwargs: (  # type: ignore[method-assign]
        ran.append(target),
        target(*args, **kwargs),
    )[1]
    for other in (x, x + 1):  # what was widened for one input is not what another one is
        got = part((other,))
        torch.testing.assert_close(got[1], other.exp().double())
    assert aten.log.default not in ran
    torch.testing.assert_close(
        truth.of([1])((x + 2,))[0], (x.double() + 2).log(), rtol=1e-6, atol=1e-6
    )


def test_the_cache_is_looked_at_while_fp64_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            for _ in range(100):
                x = aten.sin.default(x)
            return (x,)

    seen: list[int] = []
    monkeypatch.setattr(
        "blade.verification.fp64_reference.free_unused", lambda tensors: seen.append(len(tensors))
    )
    Fp64Reference(torch.fx.symbolic_trace(Many()))((torch.rand(3),))
    assert seen == [1] * 4


def test_fp64_outputs_are_freed_one_by_one() -> None:
    class Saves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = [x]
            for _ in range(8):
                results.append(aten.exp.default(aten.neg.default(results[-1])))
            return (*reversed(results), results[3])

    one, x = cluster(Saves(), [torch.rand(3, 4, generator=RNG)]), torch.rand(3, 4, generator=RNG)
    want = Fp64Reference(one.gm)((x,))
    alive: list[weakref.ref[torch.Tensor]] = []
    most, numbers = 0, []
    for number, output in Fp64Reference(one.gm).each((x,)):
        numbers.append(number)
        assert torch.equal(output, want[number])
        alive.append(weakref.ref(output))
        del output
        most = max(most, sum(ref() is not None for ref in alive))
    assert sorted(numbers) == list(range(10))
    assert most <= 3  # the input, and one that is returned twice


def test_outputs_before_an_op_without_fp64_are_compared_with_fp64() -> None:
    class Rounds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = aten.mul.Tensor(x, 1 / 3)
            return y, aten._fused_rms_norm.default(y, [4], None, None)[0]

    def raises_in_fp64(target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._fused_rms_norm.default:
            raise NotImplementedError("float64")
        return target(*args, **kwargs)

    one = cluster(Rounds(), [torch.rand(3, 4, generator=RNG)])
    truth = Fp64Reference(one.gm)
    truth.call_function = raises_in_fp64  # type: ignore[method-assign]
    found = verify(one, PythonEngine(one.gm), one.gm, "fake", truth=truth)
    assert isinstance(found, Verdict) and found.original_error_fp64 is not None


def test_eigenvalues_are_asked_for_at_the_users_contents_alone() -> None:
    """At a NaN torch's own op ends the process."""

    class Eigenvalues(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x * 2).abs()

    x = torch.randn(5, 5)
    optimized = blade.optimize(Eigenvalues().eval(), (x,), blade.Config(timing=False))
    torch.testing.assert_close(optimized(x), Eigenvalues()(x))


def test_a_size_that_rounding_decides_says_nothing() -> None:
    def one_more(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        x = inputs[0]
        return [x[x > 0.5 - 1e-8]]  # 0.5 is selected

    near = torch.tensor([0.5, 0.1, 0.9, 0.2])
    of = selection(torch.tensor([0.4, 0.1, 0.9, 0.2]), near)
    assert isinstance(run(of, run=one_more), Verdict)


def test_a_size_that_rounding_does_not_decide_is_wrong() -> None:
    def one_more(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        return [inputs[0][inputs[0] > 0.45]]

    of = selection(torch.tensor([0.4, 0.1, 0.9, 0.2]), torch.tensor([0.47, 0.1, 0.9, 0.2]))
    reason = run(of, run=one_more)
    assert isinstance(reason, Reason) and reason.code is Code.WRONG_VALUES
    assert "has shape (2,) and the original's has (1,)" in reason.detail


def test_selections_are_tried_where_sizes_depend_on_elements() -> None:
    seen: list[torch.Tensor] = []
    assert isinstance(run(selection(torch.tensor([0.7, 0.1])), run=remembering(seen)), Verdict)
    assert {0, 1, 2} <= {int((x > 0.5).sum()) for x in seen} | {2}
    assert any(not (x > 0).any() for x in seen)


def test_inputs_that_no_op_writes_to_are_not_copied_for_the_original() -> None:
    """They can be all that a model saves for backward."""
    sample = torch.randn(3, 4)
    seen: list[int] = []

    class Seen(torch.nn.Module):
        def __init__(self, op: Any) -> None:
            super().__init__()
            self.op = op

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.op(x),)

    for op, is_copied in ((aten.sin.default, False), (aten.sin_.default, True)):
        of = cluster(Seen(op), [sample])

        def original(x: torch.Tensor, op: Any = op) -> tuple[torch.Tensor]:
            seen.append(x.data_ptr())
            return (op(x),)

        before = sample.clone()
        verify(of, PythonEngine(of.gm), original, "fake", derived=False)  # type: ignore[arg-type]
        assert (sample.data_ptr() in seen) is not is_copied
        assert torch.equal(sample, before)
        seen.clear()


def test_where_the_original_has_answered_already_it_is_not_asked_again() -> None:
    asked: list[torch.Tensor] = []

    def original(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked.append(x)
        return FLOATS.gm(x)  # type: ignore[no-any-return]

    given = [inputs for (inputs,) in (*FLOATS.samples, *FLOATS.probes)]
    answers = [FLOATS.gm(x) for x in given]
    engine = PythonEngine(FLOATS.gm)
    found = verify(FLOATS, engine, original, "fake", left_out=(), answers=answers)  # type: ignore[arg-type]
    assert found == verify(FLOATS, engine, FLOATS.gm, "fake", left_out=())  # type: ignore[arg-type]
    assert asked
    assert not any(x is y for x in asked for y in given)


def test_a_known_answer_is_what_an_engine_is_held_to() -> None:
    answers = [(torch.zeros(3, 15),)]
    found = verify(FLOATS, PythonEngine(FLOATS.gm), FLOATS.gm, "fake", answers=answers)  # type: ignore[arg-type]
    assert isinstance(found, Reason)
    assert found.code is Code.WRONG_VALUES


def test_an_infinite_error_is_a_number_in_the_report() -> None:
    """Relative to zeros, any rounding is; a report is written as JSON."""
    errors = RelativeErrors(math.inf, math.inf, None)
    answer = Answer(Case("contents", "zeros", ()), 0, torch.float32, errors)
    found = asdict(verify_module._verdict([answer], 1, 0))
    assert json.loads(json.dumps(found, allow_nan=False))["error"] == sys.float_info.max
    assert verify_module._verdict([], 0, 0).error == 0.0

# SPDX-License-Identifier: Apache-2.0
"""measured_outputs: one output at a time gives the verdicts that all outputs at once give."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import (
    Fault,
    PythonEngine,
    puts_nan,
    right,
    too_many,
    wrong_dtype,
    wrong_shape,
    wrong_values,
)
from verified import cluster

from blade.core.cluster import Cluster
from blade.core.reason import Reason
from blade.report import Verdict
from blade.verification import measured_outputs
from blade.verification import verify as module
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.output_by_output import OutputByOutput
from blade.verification.verify import verify

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(0)


class Layers(torch.nn.Module):
    """Some outputs are near whatever the order of sums, others in question; one is small, one of ints."""

    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = aten.mm.default(x, self.const_0)
        z = aten.relu.default(aten.mm.default(y, self.const_0))
        chosen = aten.argmax.default(z, 1)
        return y, aten.mul.Tensor(x, 2.0), z, aten.mean.dim(z, [0, 1]), chosen


class NoFp64(torch.nn.Module):
    """The second output raises in fp64."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = aten._to_copy.default(x, dtype=torch.float32)
        return aten.exp.default(x), aten.view.dtype(half, torch.int32), aten.sin.default(x)


def another_order(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    """Off by a rounding or two where sums are."""
    return [o * (1 + 2e-7) if o.is_floating_point() else o for o in outputs]


def off_in(number: int) -> Fault:
    def run(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        outputs[number] = outputs[number] + 1
        return outputs

    return run


FAULTS: dict[str, Fault] = {
    "right": right,
    "in another order": another_order,
    "wrong values": wrong_values,
    "NaN": puts_nan,
    "shape": wrong_shape,
    "dtype": wrong_dtype,
    "too many": too_many,
    **{f"off in output {k}": off_in(k) for k in range(5)},
}


def _verdict(of: Cluster, fault: Fault) -> Verdict | Reason:
    engine = PythonEngine(of.gm, run=fault)
    return verify(
        of, engine, of.gm, "fake", derived=False, seconds=1.0, in_turn=OutputByOutput(of.gm)
    )  # type: ignore[arg-type]


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Switches it on; returns what has answered."""

    def switch() -> list[str]:
        answered: list[str] = []

        def watched(name: str) -> Callable[..., Any]:
            plain = getattr(measured_outputs, name)

            def run(*args: Any, **kwargs: Any) -> Any:
                found = plain(*args, **kwargs)
                answered.extend([name] if found is not None else [])
                return found

            return run

        monkeypatch.setattr(module, "_LARGE", 0)
        monkeypatch.setattr(module, "_is_on_gpu", lambda tensors: True)
        monkeypatch.setattr(module, "_lent", lambda inputs, updates: frozenset())
        for name in ("measure_in_turn", "chosen_in_turn"):
            monkeypatch.setattr(module, name, watched(name))
        return answered

    return switch


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", [Layers, NoFp64])
def test_the_verdict_is_the_same(
    model: type[torch.nn.Module], fault: str, in_turn: Callable[[], list[str]]
) -> None:
    of = cluster(model(), [torch.randn(32, 64, generator=RNG)])
    if fault.startswith("off in") and int(fault[-1]) >= len(of.gm.graph.output_node().args[0]):
        pytest.skip("it has fewer outputs")
    want = _verdict(of, FAULTS[fault])
    answered = in_turn()
    got = _verdict(of, FAULTS[fault])
    assert got == want
    assert ("measure_in_turn" in answered) == (fault not in ("NaN", "shape", "dtype", "too many"))
    assert isinstance(got, Verdict) == (fault in ("right", "in another order"))


class Dot(torch.nn.Module):
    """One number from many: the original's own error is small by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.const_0 = torch.randn(4096, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.sum.dim_IntList(aten.mul.Tensor(x, self.const_0), [-1]), aten.exp.default(x)


def _pairwise(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    products = inputs[0] * Dot().const_0
    return [products.view(1, 64, 64).sum(1).sum(-1), outputs[1]]


def _a_little_off(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    return [outputs[0] * (1 + 3e-6), outputs[1]]


def test_what_is_drawn_again_is_measured_in_turn(in_turn: Callable[[], list[str]]) -> None:
    samples = [torch.randn(1, 4096, generator=torch.Generator().manual_seed(n)) for n in range(40)]
    clusters = [cluster(Dot(), [sample]) for sample in samples]
    want = [_verdict(of, fault) for of in clusters for fault in (_pairwise, _a_little_off)]
    assert {type(one) for one in want} == {Verdict, Reason}
    answered = in_turn()
    assert [_verdict(of, fault) for of in clusters for fault in (_pairwise, _a_little_off)] == want
    assert "chosen_in_turn" in answered


def test_one_output_is_in_memory_at_a_time(in_turn: Callable[[], list[str]]) -> None:
    answered = in_turn()
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    class Watched(OutputByOutput):
        def each(self, inputs: Any) -> Any:
            nonlocal most
            for number, output in super().each(inputs):
                alive.add(output)
                most = max(most, len(alive))
                yield number, output
                del output

    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = [x := aten.sin.default(x) for _ in range(12)]
            return tuple(outputs)

    of = cluster(Chain(), [torch.randn(32, 64, generator=RNG)])
    got = list(of.gm(*of.samples[0]))
    truth = Fp64Reference(of.gm)
    case = measured_outputs.Case("sample", "sample 0", of.samples[0])
    found = measured_outputs.measure_in_turn(
        case, [g * (1 + 1e-5) for g in got], Watched(of.gm), truth
    )
    assert found is not None
    assert [a.output for a in found.answers] == list(range(12))
    assert all(a.errors.error_fp64 is not None for a in found.answers)
    assert [t.shape for t in found.layouts] == [g.shape for g in got]
    assert most <= 3
    assert not answered

# SPDX-License-Identifier: Apache-2.0
"""Decisions of the model's code on sizes and values, state, mutation: nothing of it may be lost."""

import warnings
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.core import torchscript
from blade.core.captured import Captured
from blade.core.reason import Code, Stage
from blade.errors import BladeWarning, InputError


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes(captured: Captured) -> list[Code]:
    assert all(one.stage is Stage.CAPTURE for one in captured.reasons)
    return [one.code for one in captured.reasons]


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


class BySize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(1) > 4:
            return x * 2
        return x - 1


class ByItem(nn.Module):
    """Decides on a value in a way the tracer does not warn about as a boolean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.abs().max())


class OnlyPython(nn.Module):
    """Decides on a size, in Python that no script understands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = dict(zip(["short", "long"], [lambda t: t - 1, lambda t: t * 2]))
        return table["long" if int(x.shape[1]) > 4 else "short"](x)


class OnlyPythonValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = dict(zip([True, False], [lambda t: t - 1, lambda t: t * 2]))
        return table[float(x.sum()) > 0](x)


class OneIsSpecial(nn.Module):
    """A size of 1 takes a short cut; the general way serves 1 too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = [lambda t: t.sum(0, keepdim=True), lambda t: t[0:1] * 1.0]
        return ways[int(x.shape[0] == 1)](x)


@pytest.mark.parametrize("model", [ByValue(), ByItem()], ids=lambda m: type(m).__name__)
def test_values_decide(model: nn.Module) -> None:
    x = random(3, 6).abs()
    captured = capture(model.eval(), x, Config())
    for other in (x, -x, -random(5, 2).abs(), random(1, 1)):
        assert torch.equal(captured.module(other), model(other))


def test_a_decision_on_a_value_is_scripted() -> None:
    assert capture(ByValue().eval(), random(3, 6), Config()).how == "script"


def test_a_decision_on_a_size_is_two_paths() -> None:
    captured = capture(BySize().eval(), random(3, 6), Config())
    assert captured.how == "trace"
    assert [path.conditions for path in captured.paths] == [
        ("x.dim() == 2", "(x.size(1)) > (4)"),
        ("x.dim() == 2", "(x.size(1)) <= (4)"),
    ]
    for other in (random(3, 6), random(3, 2), random(1, 1)):
        assert torch.equal(captured.module(other), BySize()(other))


class ByBits(nn.Module):
    def __init__(self, decides: Callable[[int], bool]) -> None:
        super().__init__()
        self.decides = decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.decides(int(x.shape[0])):
            return x * 2
        return x - 1


BITS: dict[str, Callable[[int], Any]] = {
    "or": lambda n: (n | 4) == 7,
    "odd": lambda n: n & 1,
    "low": lambda n: (n & 3) == 1,
    "scattered": lambda n: n & 10,
    "a power of two": lambda n: n & (n - 1),
}


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("sampled", [(5,), (4, 6, 7)])
def test_a_decision_on_bits_of_a_size(name: str, sampled: tuple[int, ...]) -> None:
    """A path answers only the sizes that take it."""
    model = ByBits(BITS[name]).eval()
    samples = [(random(n, 3),) for n in sampled]
    answers = capture(model, samples, Config(python_fallback=False)).module
    taken = 0
    for n in range(1, 17):
        x = random(n, 3, seed=n)
        try:
            got = answers(x)
        except torch.jit.Error as error:
            assert n not in sampled and "No captured path answers" in str(error)
        else:
            taken += 1
            assert torch.equal(got, model(x)), n
    assert taken >= len(sampled)


def test_a_short_cut_for_size_one_is_traced_around() -> None:
    captured = capture(OneIsSpecial().eval(), random(1, 6), Config())
    assert captured.how == "trace"
    for other in (random(1, 6), random(4, 6)):
        assert torch.equal(captured.module(other), OneIsSpecial()(other))


def test_what_no_path_answers_is_refused_if_strict() -> None:
    with pytest.raises(InputError, match=r"(?s)No captured path.*allow_tracing=True"):
        capture(OnlyPython().eval(), random(3, 6), Config(strict=True, max_paths=1))


def test_what_no_path_answers_is_a_warning_at_the_line_of_the_user() -> None:
    samples = [random(3, 6), random(5, 6)]
    with pytest.warns(BladeWarning) as caught:
        captured = capture(OnlyPython().eval(), samples, Config(max_paths=1))
    [warned] = [one for one in caught if one.category is BladeWarning]
    assert warned.filename == __file__
    text = str(warned.message)
    assert text.startswith("OnlyPython: The captured paths do not answer at ")
    assert "int(x.shape[1]) > 4" in text and "max_paths" in text
    for x in (random(3, 6), random(1, 5)):
        assert torch.equal(captured.module(x), OnlyPython()(x))
    with pytest.raises(Exception, match=r"test_capture_control_flow.py:\d+"):
        captured.module(random(3, 2))


def test_samples_come_first_among_the_paths() -> None:
    samples = [random(3, 6), random(3, 4)]
    captured = capture(OnlyPython().eval(), samples, Config(max_paths=2))
    assert len(captured.paths) == 2
    for size in (1, 4, 5, 9):
        x = random(3, size)
        assert torch.equal(captured.module(x), OnlyPython()(x))


@pytest.mark.parametrize(
    "config",
    [
        Config(allow_tracing=True, max_paths=1),
        Config(dynamic_shapes={"x": {1: 6}}, max_paths=1),
        Config(dynamic_shapes={0: {-1: (5, 9)}}, max_paths=1),
    ],
)
def test_one_path_by_agreement_is_no_warning(config: Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BladeWarning)
        captured = capture(OnlyPython().eval(), random(3, 6), config)
    assert captured.probes and all(probe[0].shape[1] > 4 for probe in captured.probes)
    for size in (5, 6, 9):
        x = random(2, size)
        assert torch.equal(captured.module(x), OnlyPython()(x))
    with pytest.raises(Exception, match="No captured path"):
        captured.module(random(3, 2))


def test_an_unscriptable_decision_on_a_value() -> None:
    x = random(3, 6).abs()
    captured = capture(OnlyPythonValue().eval(), x, Config())
    assert len(captured.paths) == 2 and Code.TRACE_SPECIALIZED not in codes(captured)
    for other in (x, -x, random(5, 2), torch.zeros(1, 1)):
        assert torch.equal(captured.module(other), OnlyPythonValue()(other))


class Mixed(nn.Module):
    """One part can only be traced, the other only be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.unscriptable = Unscriptable()
        self.decide = ByValue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decide(self.unscriptable(x))


class Unscriptable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(way(x) for way in (torch.sin, lambda t: t * 2))


def test_named_submodules_are_traced_and_the_rest_scripted() -> None:
    model = Mixed().eval()
    captured = capture(model, random(3, 6), Config(allow_tracing=["unscriptable"]))
    assert captured.how == "script"
    for other in (random(3, 6).abs(), -random(2, 4).abs()):
        assert torch.equal(captured.module(other), model(other))
    assert type(model.unscriptable) is Unscriptable
    with pytest.raises(InputError, match=r"no submodule 'absent'.*unscriptable"):
        capture(model, random(3, 6), Config(allow_tracing=["absent"]))


@cache
def table(length: int) -> torch.Tensor:
    return torch.arange(length) / 2


class CachedTable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + table(int(x.shape[1]))


def test_a_script_that_calls_python_is_none() -> None:
    """No file holds it, and what optimize returns can be saved."""
    x = random(3, 6)
    with pytest.warns(BladeWarning, match="table"):
        captured = capture(CachedTable().eval(), x, Config())
    assert captured.how == "trace"
    [why] = [one.detail for one in captured.reasons if one.code is Code.SCRIPT_FAILED]
    assert "calls table in Python" in why
    loaded = torchscript.load(BytesIO(torchscript.to_bytes(captured.module)))
    assert torch.equal(loaded(x), CachedTable()(x))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight + self.calls


class Rebinder(nn.Module):
    """A trace does not see the new binding; a script does."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x + self.calls


class PythonCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("kind", [Counter, Rebinder, PythonCounter])
def test_state_written_in_forward(kind: type[nn.Module], freeze: bool) -> None:
    model = kind().eval()
    captured = capture(model, random(2, 3), Config(freeze_module=freeze))
    assert float(model.calls) == 0  # type: ignore[arg-type]
    x = random(4, 3)
    for _ in range(2):
        assert torch.equal(captured.original(x), x + 1)
    for count in (1, 2, 3):
        torch.testing.assert_close(captured.module(x), x + count, rtol=0, atol=0)
    assert torch.equal(captured.original(x), x + 1)


def test_state_of_a_script_module() -> None:
    model = torch.jit.script(PythonCounter().eval())
    captured = capture(model, random(2, 3), Config())
    x = random(4, 3)
    assert model.calls == 0
    for count in (1, 2):
        assert torch.equal(captured.module(x), x + count)
        assert torch.equal(captured.original(x), x + 1)
    assert model.calls == 0


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y[0] = 5.0
        return x * y


def test_writing_to_arguments_is_kept() -> None:
    x, y = random(3, 2), random(3, 2, seed=1)
    kept = x.clone(), y.clone()
    captured = capture(Writes().eval(), (x, y), Config())
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    a, b = x.clone(), y.clone()
    want = Writes()(x, y)
    assert torch.equal(captured.module(a, b), want)
    assert torch.equal(a, x)
    assert torch.equal(b, y)


class Guarded(nn.Module):
    def forward(self, x: torch.Tensor, limit: int = 3) -> torch.Tensor:
        if x.dim() > limit:
            raise ValueError("too many dimensions")
        assert x.size(0) != 7, "seven"
        return x + 1


def test_a_script_module_keeps_exceptions_defaults_and_signature() -> None:
    model = torch.jit.script(Guarded().eval())
    captured = capture(model, random(2, 3), Config())
    assert captured.how == "script"
    assert captured.samples[0][1] == 3
    assert torch.equal(captured.module(random(4, 2)), random(4, 2) + 1)
    for bad, message in ((random(1, 1, 1, 1), "too many"), (random(7, 1), "seven")):
        with pytest.raises(Exception, match=message):
            captured.module(bad)


class Methods(nn.Module):
    version: int

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.version = 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).relu()

    @torch.jit.export
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("scripted", [False, True])
def test_preserved_attributes(scripted: bool) -> None:
    model: Any = Methods().eval()
    given = torch.jit.script(model) if scripted else model
    config = Config(preserved_attributes=["encode", "version"])
    captured = capture(given, random(2, 3), config)
    x = random(5, 3)
    assert captured.module.version == 7
    assert torch.equal(captured.module.encode(x), model.encode(x))
    assert torch.equal(captured.module(x), model(x))
    with pytest.raises(InputError, match="'absent'"):
        capture(given, random(2, 3), Config(preserved_attributes=["absent"]))


class AsDict(Methods):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.linear(x)}


class Plain(Methods):
    encode = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("kind", [Methods, AsDict, Plain])
def test_a_plain_attribute_survives_a_trace(kind: type[nn.Module]) -> None:
    config = Config(preserved_attributes=["version"])
    captured = capture(kind().eval(), {"x": random(2, 3)}, config)
    assert captured.how == "trace"
    assert captured.module.version == 7


def test_a_frozen_script_module_is_taken() -> None:
    model = Methods().eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    nodes = [node.kind() for node in frozen.graph.nodes()]
    captured = capture(frozen, random(2, 3), Config())
    assert torch.equal(captured.module(random(5, 3)), model(random(5, 3)))
    assert [node.kind() for node in frozen.graph.nodes()] == nodes


def test_a_script_module_is_not_edited() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval())
    text = str(model.inlined_graph)
    captured = capture(model, random(2, 3), Config(freeze_module=False))
    assert str(model.inlined_graph) == text
    assert "aten::dropout" not in str(captured.module.graph)


def test_random_numbers_stay_random() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    captured = capture(Noise().eval(), random(2, 3), Config())
    assert captured.how == "trace"
    x = random(4, 5)
    torch.manual_seed(3)
    want = x + torch.rand_like(x)
    torch.manual_seed(3)
    assert torch.equal(captured.module(x), want)
    assert not torch.equal(captured.module(x), want)


def test_non_tensor_outputs_are_scripted() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x + 1, x.size(0)

    captured = capture(Sizes().eval(), random(2, 3), Config())
    assert captured.how == "script"
    assert captured.module(random(5, 3))[1] == 5
    assert Code.TRACE_FAILED in codes(captured)

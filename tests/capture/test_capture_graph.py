# SPDX-License-Identifier: Apache-2.0
"""What the captured module computes: against the user's model, at the samples and at other sizes."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.core.captured import Captured


def leaves(value: Any) -> list[torch.Tensor]:
    return list(torch.utils._pytree.tree_leaves(value))


def check(captured: Captured, *args: torch.Tensor, atol: float = 0.0) -> None:
    """The captured module and the original agree at ``args``."""
    with torch.no_grad():
        want, got = captured.original(*args), captured.module(*args)
    assert len(leaves(want)) == len(leaves(got))
    for x, y in zip(leaves(want), leaves(got)):
        torch.testing.assert_close(y, x, rtol=0, atol=atol)


def kinds(captured: Captured) -> list[str]:
    return [node.kind() for node in captured.module.graph.nodes()]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.needs("minilm")
def test_minilm_keeps_its_keywords_and_returns_tensors(
    minilm: nn.Module, minilm_inputs: Callable[..., dict[str, torch.Tensor]]
) -> None:
    inputs = minilm_inputs(2, 16)
    shuffled = {name: inputs[name] for name in ("token_type_ids", "attention_mask", "input_ids")}
    captured = capture(minilm, shuffled, Config())
    assert captured.how == "trace"
    assert captured.limits == ()
    arguments = [one.name for one in captured.module.forward.schema.arguments]
    assert arguments == ["self", "input_ids", "attention_mask", "token_type_ids"]
    assert len(list(captured.module.graph.inputs())) == 4
    shapes = [[tuple(x.shape) for x in sample] for sample in captured.probes]
    assert all(len(set(one)) == 1 and min(one[0]) >= 2 for one in shapes)
    assert any(b not in (2, 16) and n not in (2, 16) and b != n for (b, n), *_ in shapes)
    for batch, length in [(1, 1), (1, 7), (3, 33), (5, 2)]:
        other = minilm_inputs(batch, length, seed=length)
        with torch.no_grad():
            want = minilm(**other)
            got = captured.module(**other)
        assert type(got) is tuple
        # Not bitwise: eager transformers drops a mask that is all ones, and takes another kernel.
        torch.testing.assert_close(got[0], want.last_hidden_state, rtol=0, atol=1e-5)
        torch.testing.assert_close(got[1], want.pooler_output, rtol=0, atol=1e-5)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


def conv_net() -> ConvNet:
    torch.manual_seed(0)
    model = ConvNet()
    model.norm.running_mean = random(8)
    model.norm.running_var = random(8).abs() + 0.5
    return model.eval()


def test_batch_norm_is_folded_and_dropout_is_gone() -> None:
    captured = capture(conv_net(), random(2, 3, 12, 12), Config())
    found = kinds(captured)
    assert "aten::batch_norm" not in found
    assert "aten::dropout" not in found
    assert "aten::_convolution" in found or "aten::conv2d" in found
    assert all(probe[0].shape[1] == 3 for probe in captured.probes)
    varied = {tuple(probe[0].shape) for probe in captured.probes}
    assert any(h != w for _, _, h, w in varied)
    check(captured, random(1, 3, 7, 9), atol=1e-5)


def test_batch_norm_of_halves_is_left_to_who_computes_it_in_float() -> None:
    """Folded, its scale would be rounded with the weights: 4 % of the output of a ResNet-50."""
    layers = [m for _ in range(4) for m in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))]
    model = nn.Sequential(*layers).eval().bfloat16()
    captured = capture(model, torch.randn(1, 3, 12, 12).bfloat16(), Config())
    kinds = [node.kind() for node in captured.module.graph.nodes()]
    assert kinds.count("aten::batch_norm") == 4


def test_unfrozen_module_keeps_its_parameters() -> None:
    model = conv_net()
    captured = capture(model, random(2, 3, 12, 12), Config(freeze_module=False))
    kept = {name for name, _ in captured.module.named_parameters()}
    assert kept == {name for name, _ in model.named_parameters()}
    assert "aten::batch_norm" in kinds(captured)
    check(captured, random(4, 3, 8, 8))


class Fields(OrderedDict):  # type: ignore[type-arg]
    pass


@dataclass
class Result:
    first: torch.Tensor
    missing: torch.Tensor | None
    nested: tuple[torch.Tensor, tuple[torch.Tensor, ...]]


class Returns(nn.Module):
    """Returns whatever ``make`` makes of x."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda x: x + 1, "t"),
        (lambda x: (x + 1,), "(t)"),
        (lambda x: [x + 1, x + 2], "(tt)"),
        (lambda x: (x + 1, [x + 2, (x + 3, None)]), "(t(t(t)))"),
        (lambda x: {"a": x + 1, "b": None, "c": (x + 2, [x + 3])}, "(ttt)"),
        (lambda x: Fields(z=x + 1, a=x + 2), "(tt)"),
        (lambda x: Result(x + 1, None, (x + 2, (x + 3, x + 4))), "(tttt)"),
        (lambda x: (x, x), "(tt)"),
    ],
)
def test_outputs_become_tensors(make: Callable[[torch.Tensor], Any], shape: str) -> None:
    captured = capture(Returns(make).eval(), random(2, 3), Config())
    got = captured.module(random(4, 5))

    def shape_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return "t"
        assert type(value) is tuple
        return f"({''.join(map(shape_of, value))})"

    assert shape_of(got) == shape
    check(captured, random(4, 5))


class Cache(nn.Module):
    def forward(
        self, x: torch.Tensor, past: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ) -> tuple[torch.Tensor, ...]:
        total = x
        for key, value in past:
            total = total + (key * value).sum(1, keepdim=True)
        return (total, *(torch.cat([key, x], 1) for key, _ in past))


def test_nested_tuple_inputs() -> None:
    def sample(batch: int, past: int) -> tuple[Any, ...]:
        pairs = tuple((random(batch, past, 4, seed=i), random(batch, past, 4)) for i in range(2))
        return random(batch, 1, 4), pairs

    captured = capture(Cache().eval(), sample(2, 6), Config())
    assert captured.how == "trace"
    assert len(list(captured.module.graph.inputs())) == 3
    assert any(probe[1][0][0].shape[1] != 6 for probe in captured.probes)
    check(captured, *sample(3, 9))


class Spread(nn.Module):
    def forward(self, *xs: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return sum(xs) + more.get("bias", 0)  # type: ignore[return-value]


def test_variadic_forward() -> None:
    captured = capture(Spread().eval(), (random(2, 3), random(2, 3)), Config())
    check(captured, random(5, 3), random(5, 3, seed=1))


def test_several_samples_tell_equal_sizes_apart() -> None:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x[:, None] * y[None]

    captured = capture(Outer().eval(), [(random(4), random(4)), (random(4), random(5))], Config())
    assert len(captured.samples) == 2
    assert any(x.shape != y.shape for x, y in captured.probes)
    check(captured, random(3), random(8))


def test_probe_contents_come_from_the_sample() -> None:
    model = nn.Embedding(5, 3).eval()
    captured = capture(model, torch.tensor([[4, 0], [1, 2]]), Config())
    assert len(captured.probes) >= 2
    for (ids,) in captured.probes:
        assert set(ids.flatten().tolist()) <= {4, 0, 1, 2}


def test_saved_and_loaded() -> None:
    captured = capture(conv_net(), random(2, 3, 12, 12), Config())
    buffer = io.BytesIO()
    torch.jit.save(captured.module, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    x = random(3, 3, 5, 5)
    torch.testing.assert_close(loaded(x), captured.original(x), rtol=0, atol=1e-5)


def test_the_users_model_is_not_changed() -> None:
    model = conv_net()
    model.register_buffer("calls", torch.zeros(1))
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    state = copy.deepcopy(model.state_dict())
    grads = [p.requires_grad for p in model.parameters()]
    hooks = len(model.head._forward_hooks)
    rng = torch.get_rng_state()
    x = random(2, 3, 12, 12)
    kept = x.clone()
    captured = capture(model, x, Config())
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not model.training
    assert [p.requires_grad for p in model.parameters()] == grads
    assert len(model.head._forward_hooks) == hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    with torch.no_grad():
        want = captured.module(x).clone()
        model.head.weight.zero_()
    assert torch.equal(captured.module(x), want)


def test_user_passes_run_on_the_inlined_graph_before_cleaning() -> None:
    seen: list[list[str]] = []

    def note(graph: torch.Graph) -> None:
        seen.append([node.kind() for node in graph.nodes()])

    captured = capture(
        conv_net(), random(2, 3, 12, 12), Config(customize_jit_passes=[note], freeze_module=False)
    )
    assert len(seen) == 1
    assert "prim::CallMethod" not in seen[0]
    assert "aten::dropout" in seen[0]
    assert "aten::dropout" not in kinds(captured)


def test_the_ends_of_declared_ranges_are_probes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    config = Config(dynamic_shapes={0: {0: (1, 40), 1: (2, 9)}})
    shapes = {
        tuple(probe[0].shape) for probe in capture(model, torch.randn(3, 5, 4), config).probes
    }
    assert {(2, 2, 4), (40, 9, 4)} <= shapes
    huge = Config(dynamic_shapes={0: {0: (1, 10**9)}})
    assert all(p[0].shape[0] < 100 for p in capture(model, torch.randn(3, 5, 4), huge).probes)


_calls: list[torch.Tensor] = []


class Noted(nn.Module):
    """Notes its inputs outside of itself: capture runs a copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _calls.append(x.clone())
        return torch.softmax(x, -1)


class NotedWithState(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) + self.calls


@pytest.mark.parametrize(("model", "runs"), [(Noted(), 1), (NotedWithState(), 6)])
def test_the_model_runs_once_per_input_and_again_only_if_it_has_a_state(
    model: nn.Module, runs: int
) -> None:
    """Each sample once for its reference; where calls change the model, twice more in a row, and three times to learn
    whether what they leave shows anywhere; the first once more to be traced."""
    samples = [random(3, 5), random(3, 5, seed=1)]
    _calls.clear()
    captured = capture(model.eval(), [(x,) for x in samples], Config())
    assert captured.how == "trace"
    counts = [sum(torch.equal(x, one) for one in _calls) for x in samples]
    assert counts == [runs + 1, runs]
    first = captured.references[0]
    assert len(first.answers) == (1 if runs == 1 else 2)
    with torch.no_grad():
        torch.testing.assert_close(first.answers[0][0], copy.deepcopy(model)(samples[0]))


class HooksAtFirst(nn.Module):
    """Registers a hook in its first call, and remembers that it did, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.inner.register_forward_hook(lambda module, args, output: output + 1)
            self.ready = True
        made: torch.Tensor = self.inner(x)
        return made


def test_hooks_of_a_first_call_are_registered_once() -> None:
    model = HooksAtFirst().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        want = model.inner(x) + 1
        got = capture(model, (x,), Config()).module(x)
    torch.testing.assert_close(got, want)
    assert not model.ready and not model.inner._forward_hooks

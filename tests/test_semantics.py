# SPDX-License-Identifier: Apache-2.0
"""What an optimized module must keep besides its values: writes, aliases, exceptions, types, randomness.

Each model goes through ``optimize`` with every cluster taken, is saved and loaded, and is then compared
with the user's own model call by call: what it returns, what it raises, what it did to its inputs.
"""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import blade
from blade.reason import Code

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
SCRIPT: tuple[str, ...] = ()  # for allow_tracing: nothing is traced


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * 3).to(dtype) if dtype is not torch.bool else made > 0


def optimized(model: nn.Module, inputs: Any, **fields: Any) -> torch.jit.ScriptModule:
    """``model`` optimized without measuring, strictly, saved and loaded."""
    config = blade.Config(**{"timing": False, "min_cluster_size": 1, "strict": True, **fields})
    made = blade.optimize(model.eval(), copy.deepcopy(inputs), config)
    buffer = io.BytesIO()
    torch.jit.save(made, buffer)
    return torch.jit.load(io.BytesIO(buffer.getvalue()))


class Outcome(NamedTuple):
    answer: Any
    error: str | None
    inputs: Any
    shares: list[tuple[int, int]]  # which of the tensors in inputs and answer share memory


def outcome(module: Callable[..., Any], inputs: Sequence[Any], grad: bool = False) -> Outcome:
    own = copy.deepcopy(tuple(inputs))
    answer, error = None, None
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        try:
            answer = module(*own)
        except Exception as raised:
            error = _message(raised)
    tensors = [t for t in pytree.tree_leaves((own, answer)) if isinstance(t, torch.Tensor)]
    keys = [t.untyped_storage().data_ptr() for t in tensors]
    shares = [
        (i, j) for j in range(len(keys)) for i in range(j) if keys[i] == keys[j] and keys[i] != 0
    ]
    return Outcome(answer, error, own, shares)


def _message(raised: Exception) -> str:
    """What the model said: TorchScript puts a traceback before it, pytest an explanation behind."""
    lines = str(raised).strip().split("\n")
    return lines[-1].rpartition("Error: ")[2] if "TorchScript" in lines[0] else lines[0]


def assert_same(got: Any, want: Any) -> None:
    """Equal in type, structure and value; tensors in dtype, shape and closely in value."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(want.dtype, 1e-5)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert got.requires_grad == want.requires_grad
    elif isinstance(want, Mapping):
        assert isinstance(got, Mapping) and list(got) == list(want)
        for key, value in want.items():
            assert_same(got[key], value)
    elif isinstance(want, tuple | list):
        assert isinstance(got, tuple | list) and len(got) == len(want)
        assert isinstance(got, list) == isinstance(want, list)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert type(got) is type(want) and got == want


def check(
    model: nn.Module,
    *calls: Sequence[Any],
    served: bool = True,
    **fields: Any,
) -> torch.jit.ScriptModule:
    """``model`` and its optimized form do the same at ``calls``, of which the first is the sample.

    ``served``: some cluster must have an engine. Else none may fail either, but it may have none.
    """
    loaded = optimized(model, tuple(calls[0]), strict=served, **fields)
    own = copy.deepcopy(model)
    for inputs in calls:
        want, got = outcome(own, inputs), outcome(loaded, inputs)
        assert got.error == want.error
        assert_same(got.answer, want.answer)
        assert_same(got.inputs, want.inputs)
        assert got.shares == want.shares
    ran = [one["engine_runs"] for one in blade.stats(loaded).values()]
    assert not served or any(ran), blade.report(loaded)
    return loaded


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def _add_to_input(x: torch.Tensor) -> torch.Tensor:
    before = torch.sin(x) * 2
    x.add_(1)
    return before + torch.cos(x)


def _assign_slice(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:] = torch.relu(x[:, :-1]) * 2
    return torch.tanh(x)


def _assign_mask(x: torch.Tensor) -> torch.Tensor:
    x[x < 0] = 0.5
    return torch.exp(-x) + 1


def _write_then_return_input(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x) * 3
    x.copy_(y)
    return x


def _write_own(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + 1
    y[0] += torch.sin(x[0]) * 2
    y.view(-1)[1:3].mul_(4)
    return torch.cos(y)


@pytest.mark.parametrize(
    "model", [_add_to_input, _assign_slice, _assign_mask, _write_then_return_input, _write_own]
)
def test_writes(model: Callable[..., Any]) -> None:
    check(Function(model), (rand(3, 4),), (rand(5, 7, seed=1),), (rand(1, 3, seed=2),))


class Cache(nn.Module):
    """One step of decoding: the cache is the caller's and is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        key = torch.tanh(self.project(x))
        cache[:, 2:4].add_(key.unsqueeze(1))
        cache.index_copy_(1, at, key.unsqueeze(1) * 2)
        scores = torch.softmax((cache * x.unsqueeze(1)).sum(-1), -1)
        return (scores.unsqueeze(-1) * cache).sum(1) + key


def test_a_cache_of_the_caller_is_written_in_place() -> None:
    calls = [(rand(b, 8), rand(b, 6, 8, seed=1), torch.tensor([5])) for b in (2, 3, 1)]
    check(Cache(), *calls)


class Running(nn.Module):
    """Keeps state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x)) * 2
        self.mean.mul_(0.9).add_(y.mean(0) * 0.1)
        self.calls += 1
        return (y - self.mean) / self.calls


def test_buffers_updated_by_forward_over_several_calls() -> None:
    model = Running()
    loaded = check(model, *[(rand(n, 4, seed=n),) for n in (3, 5, 1, 7, 3)])
    assert int(loaded.calls) == 5
    assert int(model.calls) == 0


def _view_of_input(x: torch.Tensor) -> Any:
    return x.reshape(-1), torch.relu(x) + 1


def _input_itself(x: torch.Tensor) -> Any:
    return x, torch.relu(x) + 1


def _views_of_each_other(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y, y.t(), y[0], torch.sin(y)


def _same_twice(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y, y


def _nothing_shared(x: torch.Tensor) -> Any:
    y = torch.relu(x) + 1
    return y.t(), x + 1, (y * 1).view(-1)


def _maybe_the_input(x: torch.Tensor) -> Any:
    return x.contiguous(), x.to(torch.float32), torch.relu(x) * 2


@pytest.mark.parametrize(
    "model",
    [
        _view_of_input,
        _input_itself,
        _views_of_each_other,
        _same_twice,
        _nothing_shared,
        _maybe_the_input,
    ],
)
def test_aliases(model: Callable[..., Any]) -> None:
    check(Function(model), (rand(3, 4),), (rand(5, 2, seed=1),))


def _simplified_to_the_input(x: torch.Tensor) -> Any:
    return x * 1, x.clone(), torch.cat([x]), x.neg().neg()


def _simplified_to_one(x: torch.Tensor) -> Any:
    return (
        torch.relu(x) + 1,
        torch.relu(x) + 1,
        (torch.relu(x) + 1).clone(),
        (x[:1] * 2).expand(3, 4),
    )


@pytest.mark.parametrize("model", [_simplified_to_the_input, _simplified_to_one])
def test_results_that_are_simplified_away_are_still_fresh(model: Callable[..., Any]) -> None:
    loaded = check(Function(model), (rand(3, 4),))
    x = rand(3, 4)
    before = x.clone()
    for result in loaded(x):
        if result.is_contiguous():
            result.zero_()
    assert torch.equal(x, before)
    assert_same(loaded(x), model(x))


class Checked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        if x.size(0) > 6:
            raise ValueError("too many rows")
        assert bool(y.sum() < 1000), "too large"
        x.mul_(2)
        return torch.sigmoid(y) + 1


def test_what_raises_still_raises_before_later_writes() -> None:
    calls = [(rand(3, 4),), (rand(7, 4),), (torch.full((2, 4), 900.0),), (rand(5, 4),)]
    loaded = check(Checked(), *calls)
    with pytest.raises(torch.jit.Error, match="ValueError: too many rows"):
        loaded(rand(7, 4))
    with pytest.raises(torch.jit.Error, match="AssertionError: too large"):
        loaded(torch.full((2, 4), 900.0))


def test_a_shape_error_stays_an_error() -> None:
    loaded = optimized(Function(lambda x, y: torch.relu(x) @ y + 1), (rand(3, 4), rand(4, 5)))
    with pytest.raises(RuntimeError):
        loaded(rand(3, 4), rand(3, 5))


class Returns(nn.Module):
    def forward(
        self, x: torch.Tensor
    ) -> tuple[
        int, float, bool, None, str, dict[str, list[torch.Tensor]], tuple[torch.Tensor, int]
    ]:
        y = torch.relu(x) + 1
        kept = [y, y * 2]
        kept.append(torch.sin(y))
        total = y.sum()
        return (
            x.size(0) * 2,
            float(total),
            bool(total > 0),
            None,
            "text",
            {"kept": kept, "other": [torch.cos(x)]},
            (torch.tanh(y), int(total)),
        )


def test_numbers_lists_dicts_and_none() -> None:
    check(Returns(), (rand(3, 4),), (rand(5, 2, seed=1),))


class Optional_(nn.Module):
    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 2.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = torch.relu(x) * scale
        if bias is None:
            return y + 1, bias
        return torch.sin(y) + bias, bias * 2


def test_optional_inputs_and_defaults() -> None:
    model = Optional_()
    calls = [(rand(3, 4), rand(4)), (rand(2, 4), None), (rand(5, 4), rand(4), -1.5)]
    check(model, *calls, allow_tracing=SCRIPT)
    check(model, (rand(3, 4),), (rand(2, 4), rand(4)), allow_tracing=SCRIPT)


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.nn.functional.dropout(torch.relu(x) * 2, 0.5, True)
        b = torch.rand_like(x) + torch.sigmoid(a)
        c = torch.bernoulli(torch.sigmoid(b)) * torch.normal(b, 1.0)
        return c, torch.randn(x.size(0)) + c.sum(-1)


def test_random_ops_draw_the_same_numbers() -> None:
    check(Random(), (rand(3, 4),), (rand(5, 7, seed=1),))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


SERVED = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_promotion(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + 1
        return a * 2.5, a + y.to(torch.float64), a * y.sum(), x.sum(), x == y, a / 3

    call = rand(3, 4, dtype=dtype), rand(3, 4, seed=1)
    check(Function(model), call, (rand(2, 5, dtype=dtype), rand(2, 5)), served=dtype in SERVED)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (1, 1), (2, 3, 1, 5)])
def test_zero_dimensional_and_empty_tensors(shape: tuple[int, ...]) -> None:
    def model(x: torch.Tensor) -> Any:
        y = torch.relu(x) * 2 + 1
        return y, y.sum(), torch.exp(-y).reshape(-1), torch.stack([y, x]).mean(0)

    check(Function(model), (rand(*shape),), served=0 not in shape)


def test_sizes_never_seen() -> None:
    def model(x: torch.Tensor) -> Any:
        return torch.softmax(x * 2, -1) + 1, x.sum(), torch.relu(x).reshape(-1)

    shapes = [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0), (17, 33), (2, 129)]
    check(Function(model), *[(rand(*s, seed=i),) for i, s in enumerate(shapes)])


def test_other_strides_and_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(6)).eval()
    x = rand(2, 3, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    odd = rand(2, 8, 8, 3, seed=3).permute(0, 3, 1, 2)
    loaded = check(model, (x,), (last,), (odd,), (x[:, :, ::2],), (x.expand(2, 3, 8, 8),))
    assert loaded(x).stride() == model(x).stride()
    assert optimized(model, last, strict=False)(last).stride() == model(last).stride()
    check(Function(lambda x: torch.relu(x.t()) + 1), (rand(3, 4),), (rand(4, 6).t(),))
    check(Function(lambda x: torch.relu(x) + 1), (rand(6, 8)[::2, 1:],), (rand(1, 4).expand(3, 4),))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, limit: int) -> tuple[torch.Tensor, int]:
        if x.size(0) == 0:
            return x, -1
        n = 0
        while bool(x.abs().max() > 0.1):
            x = torch.tanh(self.step(x)) * 0.5
            if n == limit:
                break
            if bool(x.sum() > 0):
                x = x - 0.1 * n
            else:
                x = torch.sin(x) + n * 0.01
            n += 1
        return torch.relu(x) + n, n


def test_data_dependent_loops_and_branches() -> None:
    torch.manual_seed(0)
    calls: list[tuple[Any, ...]] = [
        (rand(3, 4), 5),
        (rand(2, 4, seed=1), 9),
        (rand(0, 4), 3),
        (rand(1, 4), 0),
    ]
    check(Adaptive(), *calls)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h = torch.zeros(x.size(1), 4)
        states: list[torch.Tensor] = []
        for t in range(x.size(0)):
            h = torch.tanh(self.cell(torch.cat([x[t], h], -1))) * (t + 1)
            states.append(h * 2)
        return h, states


def test_a_recurrent_loop_is_served_inside() -> None:
    torch.manual_seed(0)
    loaded = check(
        Recurrent(),
        (rand(5, 2, 4),),
        (rand(3, 6, 4, seed=1),),
        (rand(0, 2, 4),),
        (rand(9, 1, 4),),
        allow_tracing=SCRIPT,
    )
    stats = blade.stats(loaded)
    assert max(s["engine_runs"] for s in stats.values()) >= 5 + 3 + 9


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.table.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.block, nn.LayerNorm(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.block(self.table(ids))
        for layer in self.layers:
            x = layer(x) + x
        return self.out(self.block(x))


def test_tied_weights_and_shared_modules() -> None:
    torch.manual_seed(0)
    calls = [(torch.tensor([[1, 2, 3]]),), (torch.arange(10).reshape(5, 2),)]
    check(Tied(), *calls)
    check(Tied(), *calls, allow_tracing=SCRIPT)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.linear(x)) * self.calls

    @torch.jit.export
    def reset(self, value: float) -> None:
        self.calls.fill_(value)

    @torch.jit.export
    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 3


def test_other_methods_share_the_state() -> None:
    torch.manual_seed(0)
    model = Methods()
    loaded = optimized(model.eval(), rand(3, 4), preserved_attributes=["reset", "project"])
    own = copy.deepcopy(model)
    x = rand(5, 4, seed=1)
    for module in (own, loaded):
        module(x)
        module.reset(10.0)
    assert_same(loaded(x).detach(), own(x).detach())
    assert_same(loaded.project(x).detach(), own.project(x).detach())
    assert blade.stats(loaded)


def test_gradients_flow_to_the_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    loaded = optimized(model, rand(3, 4))
    grads = []
    for module in (model, loaded):
        x = rand(5, 4, seed=1).requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert_same(grads[1], grads[0])
    [stats] = blade.stats(loaded).values()
    assert stats[Code.GUARD_GRAD.value] == 1
    with torch.no_grad():
        assert_same(loaded(rand(5, 4)), model(rand(5, 4)))

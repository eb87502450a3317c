# SPDX-License-Identifier: Apache-2.0
"""Drop-ins: the model's class, arguments and outputs, and its answers whatever happens to it."""

import copy
import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.core.reason import Code
from blade.errors import BladeWarning, InputError

QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)


@dataclass
class Result:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] | None = None
    name: str = "result"


class Gain(nn.Module):
    """Scales by numbers in attributes, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True
        self.factors = {"default": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors["default"] if self.is_on else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"hidden": 8}
        self.options = SimpleNamespace(negate=False)
        self.gain = Gain()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)

    def forward(
        self, x: torch.Tensor, mask: Any = None, *, states: bool = False, **more: torch.Tensor
    ) -> Result:
        if x.size(-1) != 8:
            raise ValueError("x must have 8 features")
        inner = self.gain(self.encoder(x))
        if self.options.negate:
            inner = -inner
        if mask is not None:
            inner = inner * mask["keep"].unsqueeze(-1)
        for other in more.values():
            inner = inner + other
        return Result(self.head(inner), (x, inner) if states else None)

    def labels(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).logits.argmax(-1)


def _same(found: Any, expected: Result) -> None:
    assert type(found) is type(expected) and found.name == expected.name
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.states, expected.states)


def _originals(module: Any) -> int:
    return blade.stats(module)["original"]["calls"]


@pytest.fixture
def ready() -> tuple[Net, Any]:
    """A model, and a drop-in that is optimized for calls with x alone."""
    net = Net().eval()
    return net, blade.accelerate(net, torch.rand(4, 8), QUICK)


@torch.no_grad()
def test_it_is_the_model_to_everybody_who_asks(ready: tuple[Net, Any]) -> None:
    net, fast = ready
    assert isinstance(fast, Net) and type(fast).__name__ == "Net"
    assert inspect.signature(fast.forward) == inspect.signature(net.forward)
    assert fast.config == net.config and fast.head.in_features == 8
    assert fast.state_dict().keys() == net.state_dict().keys()
    assert fast.head.weight.data_ptr() == net.head.weight.data_ptr()
    x = torch.rand(9, 8)
    assert torch.equal(fast.labels(x), net.labels(x))
    assert _originals(fast) == 0
    assert blade.report(fast).model == "Net" and isinstance(fast.optimized, torch.jit.ScriptModule)


@torch.no_grad()
def test_arguments_by_place_by_name_and_by_default_are_one_kind(ready: tuple[Net, Any]) -> None:
    net, fast = ready
    x = torch.rand(2, 5, 8)[0]
    for call in ((x,), (x, None)):
        _same(fast(*call), net(x))
    _same(fast(x=x, states=False), net(x))
    assert _originals(fast) == 0
    _same(fast(x, states=True), net(x, states=True))
    assert _originals(fast) == 1  # another kind


@torch.no_grad()
def test_kinds_are_recorded_and_optimized_in_the_background() -> None:
    net = Net().eval()
    fast = blade.accelerate(net, config=QUICK)
    with pytest.raises(InputError, match="no call is optimized yet"):
        _ = fast.optimized
    x = torch.rand(6, 8)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, {"keep": torch.rand(6).round()}), {"states": True}),
        ((), {"x": x, "bias": torch.rand(8)}),
    ]
    for args, kwargs in calls:
        for _ in range(3):
            _same(fast(*args, **kwargs), net(*args, **kwargs))
        assert blade.wait(fast, 120)
    before = _originals(fast)
    assert before == 9
    y = torch.rand(11, 8)
    _same(fast(y), net(y))
    mask = {"keep": torch.rand(11).round()}
    _same(fast(y, mask, states=True), net(y, mask, states=True))
    bias = torch.rand(8)
    _same(fast(y, bias=bias), net(y, bias=bias))
    assert _originals(fast) == before
    assert [one["calls"] for name, one in blade.stats(fast).items() if name.count(" ") == 1] == [
        1
    ] * 3


def test_training_and_gradients_are_the_models(ready: tuple[Net, Any]) -> None:
    net, fast = ready
    x = torch.rand(4, 8, requires_grad=True)
    fast(x).logits.sum().backward()
    expected = torch.autograd.grad(net(x).logits.sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    fast.train()
    fast(x.detach()).logits.sum().backward()
    assert fast.head.weight.grad is not None and net.head.weight.grad is None
    assert net.training is False and _originals(fast) == 2
    fast.eval()
    with pytest.warns(BladeWarning, match="eval mode with gradients enabled"):
        assert not fast(x.detach()).logits.requires_grad


def _write(fast: Any) -> None:
    fast.head.weight.mul_(3)


def _load(fast: Any) -> None:
    fast.load_state_dict({name: 2 * value for name, value in fast.state_dict().items()})


def _replace(fast: Any) -> None:
    fast.encoder[1] = nn.ReLU()


def _hook(fast: Any) -> None:
    fast.encoder.register_forward_hook(lambda module, args, output: output + 1)


def _patch(fast: Any) -> None:
    fast.encoder.forward = lambda x: x - 1


def _swap(fast: Any) -> None:
    fast.head.weight.data = fast.head.weight.data * 2


def _parameter(fast: Any) -> None:
    fast.head.bias = nn.Parameter(torch.ones(3))


def _flag(fast: Any) -> None:
    fast.gain.is_on = False


def _factor(fast: Any) -> None:
    fast.gain.factors["default"] = 3.0


def _option(fast: Any) -> None:
    fast.options.negate = True


CHANGES = [_write, _load, _replace, _hook, _patch, _swap, _parameter, _flag, _factor, _option]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_answers_itself(ready: tuple[Net, Any], change: Any) -> None:
    _, fast = ready
    x = torch.rand(5, 8)
    before = fast(x).logits
    change(fast)
    expected = copy.deepcopy(fast)  # of the class, but with nothing optimized for it
    expected = Net.forward(expected, x)
    _same(fast(x), expected)
    assert not torch.allclose(before, expected.logits)
    assert any(reason.code == Code.MUTATES for reason in blade.report(fast).reasons)


@torch.no_grad()
def test_a_change_is_optimized_again_and_the_users_model_stays(ready: tuple[Net, Any]) -> None:
    net, fast = ready
    fast.double()
    assert net.head.weight.dtype == torch.float32 and fast.head.weight.dtype == torch.float64
    x = torch.rand(5, 8, dtype=torch.float64)
    for _ in range(3):
        assert fast(x).logits.dtype == torch.float64
    assert blade.wait(fast, 120)
    before = _originals(fast)
    torch.testing.assert_close(fast(x).logits, copy.deepcopy(net).double()(x).logits)
    assert _originals(fast) == before
    handle = fast.encoder.register_forward_hook(lambda *_: None)
    fast(x)
    assert _originals(fast) == before + 1
    handle.remove()
    for _ in range(3):
        fast(x)
    assert blade.wait(fast, 120)
    before = _originals(fast)
    fast(x)
    assert _originals(fast) == before


@torch.no_grad()
def test_calls_under_autocast_are_the_models() -> None:
    net = Net().eval()
    x = torch.rand(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = blade.accelerate(net, x, QUICK)
        _same(fast(x), net(x))
        assert fast(x).logits.dtype == torch.bfloat16
    assert _originals(fast) == 2
    assert [r.code for r in blade.report(fast).reasons[:1]] == [Code.GUARD_AUTOCAST]
    _same(fast(x), net(x))
    assert _originals(fast) == 2


@torch.no_grad()
@pytest.mark.parametrize("layer", ["", "encoder"])
def test_a_hook_that_replaced_forward_and_was_removed_is_no_obstacle(layer: str) -> None:
    """accelerate keeps the bound method and puts it back on the object."""
    net = Net().eval()
    x = torch.rand(4, 8)
    expected = net(x)
    module = net.get_submodule(layer)
    bound = module.forward
    module.forward = lambda *args: bound(*args)
    with pytest.raises(InputError, match="was replaced on the object"):
        blade.accelerate(net)
    module.forward = bound
    fast = blade.accelerate(net, x, QUICK)
    _same(fast(x), expected)
    assert _originals(fast) == 0
    fast.get_submodule(layer).forward = fast.get_submodule(layer).forward
    fast.head.weight.mul_(2)
    fast(x)
    assert not any("was replaced" in r.detail for r in blade.report(fast).reasons)
    assert "forward" in vars(module) and not torch.equal(fast(x).logits, expected.logits)


@torch.no_grad()
def test_hooks_of_the_root_see_the_users_arguments(ready: tuple[Net, Any]) -> None:
    _, fast = ready
    seen = []
    fast.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    fast.register_forward_hook(lambda m, args, output: Result(output.logits + 1))
    x = torch.rand(2, 8)
    torch.testing.assert_close(fast(x).logits, Net().eval()(x).logits + 1)
    assert len(seen) == 1 and seen[0][0][0] is x and not seen[0][1]
    assert _originals(fast) == 0


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


@torch.no_grad()
def test_a_model_with_a_state_answers_itself() -> None:
    with pytest.warns(BladeWarning, match="changes the model"):
        fast = blade.accelerate(Counter().eval(), torch.ones(2), QUICK)
    for k in range(1, 6):
        assert fast(torch.ones(3)).tolist() == [k] * 3
    assert fast.count.item() == 5


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if x.sum() > 0:
            return {"plus": x * 2}
        return {"minus": x - 1, "size": x.size(0)}


@torch.no_grad()
def test_what_no_path_answers_keeps_its_own_structure() -> None:
    fast = blade.accelerate(Branch().eval(), torch.ones(4), QUICK)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(5), -torch.ones(6)):
        found, expected = fast(x), Branch()(x)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_errors_are_the_models(ready: tuple[Net, Any]) -> None:
    _, fast = ready
    for _ in range(2):
        with pytest.raises(ValueError, match="x must have 8 features"):
            fast(torch.rand(4, 7))
        with pytest.raises(TypeError):
            fast()
    _same(fast(torch.ones(4, 8)), Net().eval()(torch.ones(4, 8)))


@torch.no_grad()
def test_copies_and_pickles(ready: tuple[Net, Any]) -> None:
    net, fast = ready
    x = torch.rand(3, 8)
    again = copy.deepcopy(fast)
    _same(again(x), net(x))
    again.head.weight.zero_()
    assert net.head.weight.abs().sum() > 0
    _same(fast(x), net(x))
    loaded = pickle.loads(pickle.dumps(fast))
    assert isinstance(loaded, Net)
    _same(loaded(x), net(x))


@torch.no_grad()
def test_threads(ready: tuple[Net, Any]) -> None:
    net, fast = ready

    def work(k: int) -> None:
        for step in range(20):
            x = torch.rand(1 + (k + step) % 7, 8)
            states = (k + step) % 3 == 0
            _same(fast(x, states=states), net(x, states=states))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))


@torch.no_grad()
def test_parts() -> None:
    net = Net().eval()
    with blade.record(net, "encoder", "head") as calls:
        for n in (2, 2, 5):
            net(torch.rand(n, 8))
    assert [len(one) for one in calls.values()] == [2, 2] and calls["encoder"].counts == [2, 1]
    fast = blade.accelerate(net, calls, QUICK, parts=("encoder", "head"))
    x = torch.rand(7, 8)
    _same(fast(x), net(x))
    assert isinstance(fast.encoder, nn.Sequential) and len(fast.encoder) == 3
    assert blade.stats(fast.encoder)["call 1"]["calls"] == 1
    assert _originals(fast.encoder) == 0 and _originals(fast.head) == 0


def test_what_is_no_model_for_it() -> None:
    net = Net().eval()
    fast = blade.accelerate(net, config=QUICK)
    for model, why in (
        (lambda x: x, "torch.nn.Module is expected"),
        (fast, "drop-in already"),
        (torch.jit.script(nn.Linear(2, 2)), "use blade.optimize"),
        (torch.compile(net), "torch.compile"),
    ):
        with pytest.raises(InputError, match=why):
            blade.accelerate(model)
    with pytest.raises(InputError, match="no submodule 'decoder'"):
        blade.accelerate(net, parts=["decoder"])
    net.head.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="'head' has forward hooks"):
        blade.accelerate(net)


def test_the_process_may_end_while_it_is_optimized() -> None:
    code = """
import torch, blade
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
fast = blade.accelerate(model)
with torch.no_grad():
    for _ in range(4):
        torch.testing.assert_close(fast(torch.ones(3, 8)), model(torch.ones(3, 8)))
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Adapted(nn.Module):
    """A switch among its attributes, as adapters have one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y + self.adapter(x) if self.is_on else y


def test_a_state_that_comes_back_is_optimized_already() -> None:
    model = Adapted().eval()
    fast = blade.accelerate(model, config=QUICK)
    x = torch.rand(3, 8)

    def switched(is_on: bool) -> None:
        model.is_on = fast.is_on = is_on
        torch.testing.assert_close(fast(x), model(x))

    for is_on in (True, False):
        for _ in range(4):
            switched(is_on)
        assert blade.wait(fast, 200)
        switched(is_on)
    before = _originals(fast)
    for turn in range(8):  # more often than a change is optimized anew
        switched(turn % 2 == 0)
    assert _originals(fast) == before
    assert any("answers again" in one.detail for one in blade.report(fast).reasons)


def test_a_state_that_comes_back_with_other_weights_is_another() -> None:
    model = Adapted().eval()
    fast = blade.accelerate(model, torch.rand(3, 8), QUICK)
    x = torch.rand(5, 8)
    fast.is_on = False
    fast(x)
    fast.base.weight.data.mul_(2.0)  # shared; no version tells
    fast.is_on = True
    before = _originals(fast)
    torch.testing.assert_close(fast(x), model(x))
    assert _originals(fast) == before + 1

# SPDX-License-Identifier: Apache-2.0
"""Programs, and models that cannot be optimized as a whole: which of their parts become drop-ins."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.dropin import part_finder
from blade.dropin.part_finder import PartFinder
from blade.dropin.sharing_copy import sharing_copy
from blade.errors import InputError

QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)
WIDTH = 512


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _block() -> nn.Sequential:
    """Some milliseconds a call, whatever the machine does."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Coder(nn.Module):
    """Only its methods are called, as those of diffusers' autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = _block()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x) + 1  # type: ignore[no-any-return]


class Pipeline:
    """No module: it holds some, and calls them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _block().eval()
        self.coder = Coder().eval()
        self.small = nn.Identity()
        self.same = self.model
        self.name = "a pipeline"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.same(self.small(x))
        return self.coder.decode(x)


class Counting(nn.Module):
    """A state of its own keeps it from being optimized as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_block(), _block()])
        self.out = nn.Identity()
        self.calls = nn.Buffer(torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x * self.calls)  # type: ignore[no-any-return]


def _x(rows: int = 64) -> torch.Tensor:
    return torch.rand(rows, WIDTH)


def _calls(program: Any, part: str) -> int:
    return sum(
        counters["calls"]
        for name, counters in blade.stats(program).items()
        if name.startswith(f"{part}: call") and name.count(":") == 1
    )


def test_a_program_gets_drop_ins_for_what_takes_its_time() -> None:
    pipe = Pipeline()
    fast = blade.accelerate(pipe, config=QUICK)
    assert type(fast) is Pipeline and fast.name == pipe.name and fast.small is not pipe.small
    for _ in range(4):
        x = _x()
        torch.testing.assert_close(fast(x), pipe(x))
    for _ in range(3):
        torch.testing.assert_close(fast(x), pipe(x))
        assert blade.wait(fast, 200)
    before = {part: _calls(fast, part) for part in ("model", "coder.decoder")}
    x = _x(7)
    torch.testing.assert_close(fast(x), pipe(x))
    assert _calls(fast, "model") == before["model"] + 2
    assert _calls(fast, "coder.decoder") == before["coder.decoder"] + 1
    assert fast.same is fast.model and type(fast.small) is nn.Identity
    assert blade.report(fast).clusters and blade.report(fast).model.startswith("Pipeline.")
    assert type(pipe.model) is nn.Sequential and type(pipe.coder.decoder) is nn.Sequential


def test_named_parts_of_a_program_are_optimized_at_once() -> None:
    pipe = Pipeline()
    with blade.record(pipe, "coder.decoder") as calls:
        pipe(_x())
    fast = blade.accelerate(pipe, calls, QUICK)
    x = _x(5)
    torch.testing.assert_close(fast(x), pipe(x))
    assert _calls(fast, "coder.decoder") == 1 and _calls(fast, "model") == 0
    blade.rearm(fast)
    with pytest.raises(InputError, match=r"no submodule 'coder\.encoder'; the"):
        blade.accelerate(pipe, parts=["coder.encoder"])
    with pytest.raises(InputError, match=r"Its parts are drop-ins: coder\.decoder\."):
        blade.save(fast, "nowhere.blade")
    with pytest.raises(InputError, match="is a drop-in already"):
        blade.accelerate(fast)


def test_layers_of_what_cannot_be_optimized_whole() -> None:
    model = Counting().eval()
    fast = blade.accelerate(model, _x(), QUICK)
    assert type(fast.layers[0]).__name__ == "Sequential" and isinstance(fast, Counting)
    for calls, rows in enumerate((64, 3), start=1):
        x = _x(rows)
        torch.testing.assert_close(fast(x), model(x))
        assert fast.calls == model.calls == calls  # no trial has counted
        assert _calls(fast, "layers.0") == _calls(fast, "layers.1") == calls
    assert any("changes the model" in one.detail for one in blade.report(fast).reasons)
    with pytest.raises(InputError, match="no call is optimized"):
        _ = fast.optimized


def test_layers_of_what_cannot_be_optimized_whole_in_the_background() -> None:
    model = Counting().eval()
    fast = blade.accelerate(model, config=QUICK)
    x = _x()
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x))
    assert blade.wait(fast, 200)  # the model as a whole is refused
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x))
    assert blade.wait(fast, 200)
    before = _calls(fast, "layers.1")
    torch.testing.assert_close(fast(x), model(x))
    assert _calls(fast, "layers.1") == before + 1
    fast.layers[1][0].weight.mul_(2.0)  # shared: the model's, too
    torch.testing.assert_close(fast(x), model(x))
    assert _calls(fast, "layers.1") == 0


def test_a_finder_times_calls_by_who_makes_them() -> None:
    model = Counting().eval()
    with PartFinder({"net": model, "other": nn.Identity()}) as finder:
        for _ in range(3):
            model(_x())
            model.layers[1](_x())
    assert finder.alone == 6
    assert sorted(finder.called_alone()) == ["net", "net.layers.1"]
    assert sorted(finder.below("net")) == ["net.layers.0", "net.layers.1"]  # not the identity
    model(_x())
    assert finder.alone == 6
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_a_call_that_is_stalled_once_makes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline()
    now, is_first = 0.0, True
    monkeypatch.setattr(part_finder, "perf_counter", lambda: now)

    def work(module: nn.Module, args: Any) -> None:
        nonlocal now
        now += 5e-3

    def stall(module: nn.Module, args: Any) -> None:
        nonlocal now, is_first
        now += 0.2 if is_first else 1e-6
        is_first = False

    with PartFinder({"model": pipe.model, "small": pipe.small}) as finder:
        pipe.model.register_forward_pre_hook(work)
        pipe.small.register_forward_pre_hook(stall)
        for _ in range(3):
            pipe(_x())
    assert not is_first and finder.called_alone() == ["model"]


def test_a_call_that_raises_ends_its_measurement() -> None:
    model = Counting().eval()
    with PartFinder({"net": model}) as finder:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                model(torch.rand(2, 3))
            model(_x())
    assert finder.alone == 6 and finder.called_alone() == ["net"]


def test_what_measures_is_seen_by_nobody() -> None:
    fast = blade.accelerate(Counting().eval(), config=QUICK)
    inner = fast.layers[0]
    assert inner._forward_hooks  # it is being measured
    copied = copy.deepcopy(fast)
    assert torch.equal(pickle.loads(pickle.dumps(fast)).layers[0][0].weight, inner[0].weight)
    x = _x(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(lambda x: fast.layers[1](x) + 1, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), fast.layers[1](x) + 1)
    torch.testing.assert_close(copied(x), fast(x))
    again = sharing_copy(fast)
    assert not any(one._forward_hooks for one in again.modules())

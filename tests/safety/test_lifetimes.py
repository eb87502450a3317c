# SPDX-License-Identifier: Apache-2.0
"""An engine lives as long as somebody holds it: loaded, copied, adopted, or dropped by one thread among others.

Resident memory is compared in a process of its own, with what plain TorchScript modules of the same size leave behind.
That runners are destroyed shows exactly: a weak reference to what was loaded for an engine dies with it.
"""

import copy
import gc
import io
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from blade.runtime.engine import make_engine, make_pending, register_runner

pytestmark = pytest.mark.needs("runtime")

BACKEND = "lifetimes"
PROGRAM = """blade.disc 1
isa
inputs 1
input 0 f32 cpu 2
registers 2
reg 0 dim 0 0
reg 1 dim 0 1
guards 0
slots 1
slot 0 output f32 2 0 1
instructions 0
outputs 1 0
end
"""

PRODUCT = """blade.disc 1
isa
inputs 1
input 0 f32 cpu 2
registers 2
reg 0 dim 0 0
reg 1 const 2048
guards 0
slots 3
slot 0 input 0
slot 1 const 0
slot 2 output f32 2 0 1
instructions 1
call aten::mm.out 3 t:0 t:1 t:2 0
outputs 1 2
end
"""


class Loaded:
    """What a runner is for one engine: alive as long as that is."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] * self.weight]


@pytest.fixture
def alive() -> Iterator[weakref.WeakSet]:
    """The runners of engines that have been called and still exist."""
    found: weakref.WeakSet = weakref.WeakSet()

    def load(
        name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        runner = Loaded(constants[0])
        found.add(runner)
        return runner

    register_runner(BACKEND, load)
    yield found


class Holder(nn.Module):
    def __init__(self, engine: torch.ScriptObject, weight: torch.Tensor) -> None:
        super().__init__()
        self.engine = engine
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        if outs is None:
            return x * self.weight
        return outs[0]


def engine(weight: torch.Tensor, name: str = "engine") -> torch.ScriptObject:
    return make_engine(name, BACKEND, PROGRAM, b"a payload", [weight])


def module(weight: torch.Tensor) -> torch.jit.ScriptModule:
    holder = Holder(make_pending("none"), weight)
    holder.engine = engine(holder.weight)
    return torch.jit.script(holder.eval())


def saved(made: torch.jit.ScriptModule) -> bytes:
    data = io.BytesIO()
    torch.jit.save(made, data)
    return data.getvalue()


def remaining(alive: weakref.WeakSet) -> int:
    gc.collect()
    return len(alive)


def answers(one: torch.jit.ScriptModule, x: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(one(x), x * weight)
    assert one.engine.stats()["fallbacks"] == 0


def test_a_loaded_engine_is_destroyed_with_its_module(alive: weakref.WeakSet) -> None:
    weight, x = torch.randn(5), torch.randn(3, 5)
    data = saved(module(weight))
    for _ in range(4):
        loaded = torch.jit.load(io.BytesIO(data))
        answers(loaded, x, weight)
        assert remaining(alive) == 1
        del loaded
        assert remaining(alive) == 0


def test_who_holds_only_the_engine_keeps_it(alive: weakref.WeakSet) -> None:
    weight, x = torch.randn(5), torch.randn(3, 5)
    loaded = torch.jit.load(io.BytesIO(saved(module(weight))))
    held = loaded.engine
    answers(loaded, x, weight)
    del loaded
    assert remaining(alive) == 1
    assert torch.equal(held.try_execute([x])[0], x * weight)
    del held
    assert remaining(alive) == 0


def test_deep_copies_are_freed(alive: weakref.WeakSet) -> None:
    weight, x = torch.randn(5), torch.randn(3, 5)
    first = module(weight)
    answers(first, x, weight)
    copies = [copy.deepcopy(first) for _ in range(3)]
    copies += [copy.deepcopy(copies[0])]
    for one in copies:
        answers(one, x, weight)
    assert remaining(alive) == 5
    del copies, one
    assert remaining(alive) == 1
    answers(first, x, weight)
    del first
    assert remaining(alive) == 0


def test_what_a_pending_engine_adopted_is_freed_with_it(alive: weakref.WeakSet) -> None:
    weight, x = torch.randn(5), torch.randn(3, 5)
    pending = make_pending("later")
    loaded = torch.jit.load(io.BytesIO(saved(module(weight))))
    assert pending.adopt(loaded.engine)
    assert not pending.adopt(engine(weight))
    del loaded
    assert torch.equal(pending.try_execute([x])[0], x * weight)
    assert remaining(alive) == 1
    again = copy.deepcopy(pending)  # of an engine that serves: a copy of the one that it adopted
    assert torch.equal(again.try_execute([x])[0], x * weight)
    assert remaining(alive) == 2
    del pending
    assert remaining(alive) == 1
    del again
    assert remaining(alive) == 0


def test_engines_are_destroyed_while_others_are_called(alive: weakref.WeakSet) -> None:
    """The last reference goes in one thread, to a collection even, while others load, call and copy their own."""
    weight, x = torch.randn(5), torch.randn(3, 5)
    data = saved(module(weight))
    shared = [torch.jit.load(io.BytesIO(data))]
    answers(shared[0], x, weight)
    want, failed = x * weight, []

    def work(thread: int) -> None:
        try:
            for turn in range(30):
                own = torch.jit.load(io.BytesIO(data))
                cycle = [own, copy.deepcopy(own), shared[0]]
                cycle.append(cycle)  # only a collection frees it
                assert all(torch.equal(one(x), want) for one in cycle[:3])
                del own, cycle
                if turn % 10 == thread:
                    gc.collect()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert remaining(alive) == 1
    assert shared[0].engine.stats() == {"calls": 181, "engine_runs": 181, "fallbacks": 0}
    shared.clear()
    assert remaining(alive) == 0


GROWTH = """
import copy, ctypes, gc, io, json, sys
import torch
import blade.runtime.engine

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def grown(path, again):
    data = open(path, "rb").read()
    for k in range(33):
        if k == 3:  # pools and caches are filled
            before = resident()
        module = again(io.BytesIO(data) if k % 2 else path)
        module(torch.ones(2, 1024))
        del module
    return resident() - before

found = {}
for kind, path in zip(("plain", "engine"), sys.argv[1:]):
    found[f"{kind} load"] = grown(path, torch.jit.load)
    found[f"{kind} copy"] = grown(path, lambda file: copy.deepcopy(torch.jit.load(file)))
print(json.dumps(found))
"""
MARGIN_MIB = 4.0  # of 30 times 8: half of one file


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """MiB by which 30 loads of 8 MiB, each dropped, leave a process larger."""
    folder: Path = tmp_path_factory.mktemp("files")
    weight = nn.Parameter(torch.randn(1024, 2048), requires_grad=False)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight)

    class WithEngine(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.engine = make_engine("product", "disc", PRODUCT, b"", [self.weight])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outs = self.engine.try_execute([x])
            if outs is None:
                return torch.mm(x, self.weight)
            return outs[0]

    paths = [folder / "plain.pt", folder / "engine.pt"]
    for path, made in zip(paths, (Plain(), WithEngine()), strict=True):
        torch.jit.script(made.eval()).save(str(path))
    # A fixed threshold: malloc raises its own once such a block is freed, and keeps later ones in its heap.
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", ["load", "copy"])
def test_thirty_loads_leave_no_more_than_torchscript_does(
    growth: dict[str, float], way: str
) -> None:
    assert growth[f"engine {way}"] < max(growth[f"plain {way}"], 0) + MARGIN_MIB, growth


def test_pending_engines_do_not_adopt_each_other() -> None:
    """No call of either would come to an end."""
    one, other = make_pending("one"), make_pending("other")
    assert not one.adopt(other) and not other.adopt(one) and not one.adopt(one)
    assert one.try_execute([torch.ones(2)]) is None

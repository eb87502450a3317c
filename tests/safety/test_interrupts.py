# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupt, SystemExit and what a signal's handler raises go through an engine; nothing is counted."""

import functools
import itertools
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from blade.core.reason import Code
from blade.runtime.engine import make_engine, register_runner

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(3)
PROGRAM = "\n".join(
    [
        *("blade.disc 1", "isa", "inputs 1", "input 0 f32 cpu 1", "registers 0", "guards 0"),
        *("slots 0", "instructions 0", "outputs 0", "end"),
    ]
)
_numbers = itertools.count()


def engine_of(load: Callable[..., object]):
    backend = f"interrupted_{next(_numbers)}"
    register_runner(backend, load)
    return make_engine("e", backend, PROGRAM, b"x")


class Module(nn.Module):
    """As a cluster's: TorchScript's interpreter is between the engine and the caller."""

    def __init__(self, engine: torch.ScriptObject) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        return x if outs is None else outs[0]


ENTRANCES = {
    "engine": lambda engine: lambda x: engine.try_execute([x]),
    "module": lambda engine: torch.jit.script(Module(engine)),
}


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[..., None]], None]]:
    """Sets a handler of SIGALRM that strikes in 50 ms; what was set before is set again."""
    before = signal.getsignal(signal.SIGALRM)

    def strike(handler: Callable[..., None]) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield strike
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def nothing_was_counted(engine) -> bool:
    stats = engine.stats()
    return stats["fallbacks"] == 0 and stats["calls"] == stats["engine_runs"]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(3)], ids=["^C", "exit"])
def test_no_failures_of_the_engine(entrance: str, error: BaseException) -> None:
    raised: list[BaseException] = []

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if raised:
            raise raised[0]
        return [inputs[0] * 2]

    engine = engine_of(lambda *_: run)
    call = ENTRANCES[entrance](engine)
    call(X)
    raised.append(error)
    for _ in range(5):  # more than open the circuit
        with pytest.raises(type(error)) as caught:
            call(X)
        assert caught.value is error
    assert nothing_was_counted(engine)
    raised.clear()
    answer = call(X)
    assert torch.equal(answer if isinstance(answer, torch.Tensor) else answer[0], X * 2)
    assert engine.stats()["engine_runs"] == 2


class Deadline(Exception):
    """What a user's time limit raises."""


def too_late(*anything: object) -> None:
    raise Deadline


class Striking:
    def __call__(self, number: int, frame: object) -> None:
        raise Deadline

    def method(self, number: int, frame: object) -> None:
        raise Deadline


HANDLERS = {
    "function": too_late,
    "method": Striking().method,
    "object": Striking(),
    "partial": functools.partial(too_late, "more"),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("handler", HANDLERS)
def test_an_alarm_that_strikes_inside(entrance: str, handler: str, alarm) -> None:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        end = time.monotonic() + 30
        while waits and time.monotonic() < end:
            time.sleep(0.001)
        return [inputs[0] * 2]

    waits = False
    engine = engine_of(lambda *_: run)
    call = ENTRANCES[entrance](engine)
    call(X)
    waits = True
    for _ in range(4):
        alarm(HANDLERS[handler])
        with pytest.raises(Deadline):
            call(X)
    assert nothing_was_counted(engine)


def test_an_interrupt_while_it_is_loaded() -> None:
    tries = []

    def load(*_: object):
        tries.append(1)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return lambda inputs: [inputs[0] * 2]

    engine = engine_of(load)
    with pytest.raises(KeyboardInterrupt):
        engine.try_execute([X])
    assert nothing_was_counted(engine)
    (answer,) = engine.try_execute([X])  # it was not given up
    assert torch.equal(answer, X * 2)


def test_an_exception_of_the_engine_still_counts() -> None:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise TimeoutError("of the library's own")

    engine = engine_of(lambda *_: run)
    for _ in range(3):
        assert engine.try_execute([X]) is None
    assert engine.stats()[Code.ENGINE_RAISED.value] == 3
    assert engine.try_execute([X]) is None
    assert engine.stats()[Code.CIRCUIT_OPEN.value] == 1

# SPDX-License-Identifier: Apache-2.0
"""Backends whose engines are Python functions."""

import gc
import itertools
import weakref

import pytest
import torch
from programs import Writer

from blade.errors import BackendError
from blade.runtime.engine import make_engine, register_runner

_numbers = itertools.count()


def even_columns() -> str:
    w = Writer()
    x = w.input("f32", 2)
    columns = w.reg(f"dim {x} 1")
    w.guard(w.reg(f"eq {w.reg(f'mod {columns} {w.const(2)}')} {w.const(0)}"), "columns % 2 == 0")
    return w.text()


def two_outputs() -> str:
    """A matrix as it came, and its row sums in int64."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    w.outputs = [w.tensor("output", [rows, columns]), w.tensor("output", [rows], "i64")]
    return w.text()


def engine_of(load, payload: bytes = b"abc", constants=()):
    backend = f"fake_{next(_numbers)}"
    engine = make_engine("cluster_7", backend, even_columns(), payload, constants)
    register_runner(backend, load)  # also after the engine exists
    return engine


def test_the_loader_gets_the_payload_and_runs_once():
    seen = []

    def load(name, payload, constants, program):
        seen.append((name, bytes(payload.numpy()), constants, program))
        return lambda inputs: [inputs[0] + constants[0], inputs[0] * 2]

    constant = torch.randn(4)
    engine = engine_of(load, constants=[constant])
    assert engine.why_unavailable() == ""
    x = torch.randn(3, 4)
    for _ in range(3):
        total, double = engine.try_execute([x])
        assert torch.equal(total, x + constant) and torch.equal(double, x * 2)
    ((name, payload, constants, program),) = seen
    assert (name, payload, program) == ("cluster_7", b"abc", even_columns())
    assert constants[0].data_ptr() == constant.data_ptr()


def test_a_payload_for_another_cpu_is_never_given_to_its_backend():
    loads = []
    program = even_columns().replace("isa", "isa warp_drive", 1)
    backend = f"fake_{next(_numbers)}"
    register_runner(backend, lambda *engine: loads.append(engine))
    engine = make_engine("cluster_7", backend, program, b"abc")
    assert engine.try_execute([torch.randn(3, 4)]) is None
    engine.rearm()
    assert engine.try_execute([torch.randn(3, 4)]) is None
    assert engine.stats()["cpu_mismatch"] == 2
    assert "'warp_drive', which this CPU lacks" in engine.why_unavailable()
    assert loads == []


def test_guards_hold_for_every_backend():
    engine = engine_of(lambda *_: lambda inputs: inputs)
    assert engine.try_execute([torch.randn(3, 5)]) is None
    assert engine.try_execute([torch.randn(3)]) is None
    stats = engine.stats()
    assert stats["guard_shape"] == 1 and stats["guard_rank"] == 1


def test_a_runner_that_raises_trips_the_circuit():
    def run(inputs):
        raise ValueError("the kettle is empty")

    engine = engine_of(lambda *_: run)
    for _ in range(4):
        assert engine.try_execute([torch.randn(3, 4)]) is None
    assert engine.stats()["engine_raised"] == 3 and engine.stats()["circuit_open"] == 1
    assert "the kettle is empty" in engine.last_error()


def test_a_runner_that_returns_no_tensors_raises():
    engine = engine_of(lambda *_: lambda inputs: ["tea"])
    assert engine.try_execute([torch.randn(3, 4)]) is None
    assert engine.stats()["engine_raised"] == 1 and engine.last_error()


GOOD = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (GOOD, None),
        (GOOD[:1], "returned 1 tensors, not 2"),
        ((*GOOD, GOOD[0]), "returned 3 tensors, not 2"),
        ((GOOD[0], GOOD[1].int()), "output 1 of the engine is Int, not Long"),
        ((GOOD[0].mT, GOOD[1]), "output 0 of the engine has the wrong shape [4, 3]"),
        ((GOOD[0], GOOD[1][:, None]), "output 1 of the engine has the wrong shape [3, 1]"),
    ],
)
def test_declared_outputs_are_checked_at_every_call(answer, why):
    backend = f"fake_{next(_numbers)}"
    register_runner(backend, lambda *_: lambda inputs: list(answer))
    engine = make_engine("cluster_7", backend, two_outputs(), b"")
    answered = engine.try_execute([torch.randn(3, 4)]) is not None
    assert answered == (why is None)
    assert why is None or why in engine.last_error()


@pytest.mark.parametrize("error", [BackendError("wrong GPU"), KeyError("wrong GPU")])
def test_an_engine_that_cannot_be_loaded(error):
    tries = []

    def load(*_):
        tries.append(1)
        if len(tries) == 1:
            raise error
        return lambda inputs: inputs

    engine = engine_of(load)
    for _ in range(2):
        assert engine.try_execute([torch.randn(3, 4)]) is None
    assert engine.stats()["backend_unavailable"] == 2 and len(tries) == 1
    assert "wrong GPU" in engine.why_unavailable()
    engine.rearm()
    assert engine.try_execute([torch.randn(3, 4)]) is not None


def test_gradients_are_off_inside_a_runner():
    weight = torch.randn(4, requires_grad=True)
    engine = engine_of(lambda *_: lambda inputs: [inputs[0] * weight])
    (y,) = engine.try_execute([torch.randn(3, 4)])
    assert not y.requires_grad


def test_runners_die_with_their_engine():
    class Session:
        def __call__(self, inputs):
            return inputs

    sessions = []

    def load(name, payload, constants, program):
        session = Session()
        session.payload = payload  # as onnxruntime would keep its model
        sessions.append(weakref.ref(session))
        return session

    engine = engine_of(load)
    gc.collect()
    for _ in range(2):
        assert engine.try_execute([torch.randn(3, 4)]) is not None
        gc.collect()
    assert len(sessions) == 1 and sessions[0]() is not None
    del engine
    gc.collect()
    assert sessions[0]() is None

# SPDX-License-Identifier: Apache-2.0
"""Engines that raise: counted, remembered, and after a while no longer tried."""

import pytest
import torch
from programs import Writer, matrix_times_itself, relu_program
from torch.utils._python_dispatch import TorchDispatchMode

from blade.runtime.engine import make_engine, renew


def test_the_circuit_opens_after_failures_in_a_row_and_can_be_rearmed():
    engine = matrix_times_itself().engine(limits={"max_failures": 2})
    good, bad = torch.randn(3, 3), torch.randn(3, 4)  # only square matrices multiply
    for x, runs in ((bad, False), (good, True), (bad, False), (bad, False), (good, False)):
        assert (engine.try_execute([x]) is not None) == runs
    stats = engine.stats()
    assert stats == {
        "calls": 5, "engine_runs": 1, "fallbacks": 4, "engine_raised": 3, "circuit_open": 1
    }  # fmt: skip
    assert "mat1 and mat2" in engine.last_error()
    engine.rearm()
    assert torch.allclose(engine.try_execute([good])[0], good @ good)


class Watching(TorchDispatchMode):
    """As the one around the first call of a graph compiled ahead of time."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_an_op_that_raises_leaves_no_error_of_pythons_behind():
    engine = matrix_times_itself().engine(limits={"max_failures": 9})
    with Watching():
        assert engine.try_execute([torch.randn(3, 4)]) is None
        assert "mat1 and mat2" in engine.last_error()
        good = torch.randn(3, 3)
        assert torch.allclose(engine.try_execute([good])[0], good @ good)


def test_a_renewed_engine_has_no_past():
    engine = matrix_times_itself().engine(limits={"max_failures": 1})
    good, bad = torch.randn(3, 3), torch.randn(3, 4)
    assert engine.try_execute([good]) is not None
    assert engine.try_execute([bad]) is None
    engine.set_enabled(False)
    renew(engine)
    assert engine.stats() == {"calls": 0, "engine_runs": 0, "fallbacks": 0}
    assert engine.last_error() == ""
    assert torch.allclose(engine.try_execute([good])[0], good @ good)


def test_a_failed_guard_is_not_a_failure():
    engine = relu_program().engine(limits={"max_failures": 1})
    for _ in range(3):
        assert engine.try_execute([torch.randn(2, 3)]) is None
    assert engine.try_execute([torch.randn(2, 4)]) is not None


def test_out_of_memory_is_a_fallback():
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    huge = w.const(2**45)
    h = w.tensor("arena", [huge])
    y = w.tensor("output", [n])
    a = w.slot(f"input {x}")
    w.call("aten::relu.out", f"t:{a}", f"t:{y}")
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.outputs = [y]
    engine = w.engine()
    assert engine.try_execute([torch.randn(3)]) is None
    assert engine.stats()["engine_raised"] == 1
    assert "memory" in engine.last_error()


BROKEN = [
    ("", "'blade.disc' is missing"),
    ("blade.disc one", "'one' is not an integer"),
    ("blade.disc 1\nisa\ninputs 1\ninput 0 f33 cpu 1", "unknown dtype 'f33'"),
    ("blade.disc 1\nisa\ninputs 1\ninput 1 f32 cpu 1", "count up from 0"),
    ("blade.disc 1\nisa\ninputs 1\ninput 0 f32 cpu 1 7", "unexpected '7'"),
    ("blade.disc 1\nisa\ninputs 1\ninput 0 f32 cpu 1\nregisters 1\nreg 0 dim 0 1", "axis 1"),
    ("blade.disc 1\nisa\ninputs 0\nregisters 1\nreg 0 add 0 0", "register 0 is not defined"),
    ("blade.disc 1\nisa\ninputs 0\nregisters 1\nreg 0 div 0 0", "unknown register operation"),
    ("blade.disc 1\nisa\ninputs 0\nregisters 0\nguards 0\nslots 1\nslot 0 const 0", "constant 0"),
    ("blade.disc 1\nisa\ninputs 0\nregisters 0\nguards 0\nslots 9", "ends too early"),
]


@pytest.mark.parametrize(("text", "why"), BROKEN)
def test_programs_that_do_not_parse(text, why):
    engine = make_engine("broken", "disc", text, b"")
    assert why in engine.why_unavailable()
    assert engine.try_execute([]) is None
    assert engine.stats()["corrupt_payload"] == 1


@pytest.mark.parametrize(
    ("base", "again", "why"),
    [
        ("output", "reuse 1", "only an arena slot can be reused"),
        ("arena", "reuse 7", "slot 7 is not defined"),
        ("arena", "over 1", "unexpected 'over'"),
        ("arena", "reuse 1 1", "unexpected '1'"),
        ("arena", "reuse 1", "does not begin where slot 1"),
    ],
)
def test_slots_that_cannot_be_reused(base, again, why):
    """The first buffer is still read where the second is."""
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    a, h = w.slot(f"input {x}"), w.tensor(base, [n])
    second, y = w.slot(f"arena f32 1 {n} {again}"), w.tensor("output", [n])
    w.call("aten::neg.out", f"t:{a}", f"t:{h}")
    w.call("aten::neg.out", f"t:{h}", f"t:{second}")
    w.call("aten::add.out", f"t:{h}", f"t:{second}", "i:1", f"t:{y}")
    w.outputs = [y]
    assert why in w.engine().why_unavailable()


def test_a_slot_is_reused_once():
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    a, h = w.slot(f"input {x}"), w.tensor("arena", [n])
    first, second = (w.slot(f"arena f32 1 {n} reuse {h}") for _ in range(2))
    w.call("aten::neg.out", f"t:{a}", f"t:{h}")
    w.call("aten::neg.out", f"t:{h}", f"t:{first}")
    w.outputs = [first, second]
    assert "reused twice" in w.engine().why_unavailable()


def test_kernels_without_code():
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    y = w.tensor("output", [n])
    w.kernel("k", n, n, w.const(0), [w.slot(f"input {x}"), y], [])
    w.outputs = [y]
    assert "no native code" in w.engine().why_unavailable()

# SPDX-License-Identifier: Apache-2.0
"""Instructions that run only where a register is not zero."""

import torch
from programs import Writer


def either() -> Writer:
    """relu of a vector of more than 3, the negative of a shorter one."""
    w = Writer()
    x = w.input("f32", 1)
    (n,), three = w.dims(x, 1), w.const(3)
    large, small = w.reg(f"gt {n} {three}"), w.reg(f"le {n} {three}")
    a, y = w.slot(f"input {x}"), w.tensor("output", [n])
    w.call("aten::relu.out", f"t:{a}", f"t:{y}")
    w.when(large)
    w.call("aten::neg.out", f"t:{a}", f"t:{y}")
    w.when(small)
    w.outputs = [y]
    return w


def test_one_of_two_calls_runs():
    engine = either().engine()
    for n in (1, 3, 4, 9, 2, 4):
        x = torch.randn(n)
        want = x.relu() if n > 3 else -x
        assert torch.equal(engine.try_execute([x])[0], want)


def test_a_skipped_call_leaves_its_result_to_nobody():
    """The second call reads what the first returns: at sizes where only the second runs, the engine raises."""
    w = Writer()
    x = w.input("f32", 1)
    (n,), one, three = w.dims(x, 1), w.const(1), w.const(3)
    large = w.reg(f"gt {n} {three}")
    h, y = w.slot(f"dyn f32 1 {n} {one}"), w.tensor("output", [n])
    w.call("aten::relu", f"t:{w.slot(f'input {x}')}", results=(h,))
    w.when(large)
    w.call("aten::neg.out", f"t:{h}", f"t:{y}")
    w.outputs = [y]
    engine = w.engine()
    assert torch.equal(engine.try_execute([torch.ones(5)])[0], -torch.ones(5))
    assert engine.try_execute([torch.ones(2)]) is None
    assert f"what makes slot {h} is skipped" in engine.last_error()


def test_results_that_are_skipped_with_their_readers():
    w = Writer()
    x = w.input("f32", 1)
    (n,), one, three = w.dims(x, 1), w.const(1), w.const(3)
    large, small = w.reg(f"gt {n} {three}"), w.reg(f"le {n} {three}")
    a, h, y = w.slot(f"input {x}"), w.slot(f"dyn f32 1 {n} {one}"), w.tensor("output", [n])
    w.call("aten::relu", f"t:{a}", results=(h,))
    w.when(large)
    w.call("aten::neg.out", f"t:{h}", f"t:{y}")
    w.when(large)
    w.call("aten::exp.out", f"t:{a}", f"t:{y}")
    w.when(small)
    w.outputs = [y]
    engine = w.engine()
    for n in (2, 5, 2, 5):
        x = torch.randn(n)
        want = -x.relu() if n > 3 else x.exp()
        assert torch.equal(engine.try_execute([x])[0], want)

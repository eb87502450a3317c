# SPDX-License-Identifier: Apache-2.0
"""The memory plan: random straight-line programs against eager, and memory that does not grow."""

import random
import resource

import pytest
import torch
from programs import Writer, relu_program

UNARY = {"aten::relu.out": torch.relu, "aten::neg.out": torch.neg, "aten::tanh.out": torch.tanh}
BINARY = {"aten::mul.out": torch.mul, "aten::maximum.out": torch.maximum}


def random_program(rng: random.Random, length: int):
    """A program over [n, m] tensors, some transposed through views, and the same in eager."""
    w = Writer()
    x = w.input("f32", 2)
    n, m = w.dims(x, 2)
    one, zero = w.const(1), w.const(0)
    values = [w.slot(f"input {x}")]
    recipe = []
    for step in range(length):
        last = step == length - 1
        out = w.tensor("output" if last or rng.random() < 0.1 else "arena", [n, m])
        # mostly recent values, so that lives are short and bytes are shared
        picks = [rng.randrange(max(0, len(values) - 4), len(values)) for _ in range(2)]
        if rng.random() < 0.5:
            op, picks = rng.choice(sorted(UNARY)), picks[:1]
            w.call(op, f"t:{values[picks[0]]}", f"t:{out}")
        else:
            op = rng.choice(sorted(BINARY))
            w.call(op, *(f"t:{values[p]}" for p in picks), f"t:{out}")
        recipe.append((op, picks))
        view = w.view(out, [n, m], [m, one], zero) if rng.random() < 0.3 else out
        values.append(view)
        if w.slots[out].startswith("output") or rng.random() < 0.05:
            w.outputs.append(view)
            recipe[-1] = (op, picks, True)
    return w, recipe


def eager(recipe, x):
    values, outputs = [x], []
    for op, picks, *is_output in recipe:
        values.append({**UNARY, **BINARY}[op](*(values[p] for p in picks)))
        if is_output:
            outputs.append(values[-1])
    return outputs


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_compute_what_eager_does(seed):
    rng = random.Random(seed)
    w, recipe = random_program(rng, rng.choice([3, 10, 40]))
    engine = w.engine()
    kept = []
    for _ in range(12):
        x = torch.randn(rng.choice([1, 3, 17]), rng.choice([1, 5, 64, 101]))
        got = engine.try_execute([x])
        assert got is not None, engine.last_error()
        kept.append((got, eager(recipe, x)))
    for got, want in kept:  # at the end: no later call may have written into them
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=0)


def chain(length: int) -> Writer:
    w = Writer()
    x = w.input("f32", 2)
    sizes = w.dims(x, 2)
    value = w.slot(f"input {x}")
    for step in range(length):
        out = w.tensor("output" if step == length - 1 else "arena", sizes)
        w.call("aten::neg.out", f"t:{value}", f"t:{out}")
        value = out
    w.outputs = [value]
    return w


def resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def test_buffers_that_do_not_live_together_share_bytes():
    """40 buffers of 16 MiB, two alive at a time."""
    engine = chain(41).engine()
    x = torch.randn(2048, 2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (y,) = engine.try_execute([x])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    torch.testing.assert_close(y, -x, rtol=0, atol=0)
    assert grown < 100, f"{grown:.0f} MiB for two buffers of 16 MiB and an output"


def test_a_reused_slot_is_the_other_ones_memory():
    """The second slot is read before anything was written to it: what is there is the first one."""
    w = Writer()
    x = w.input("f32", 1)
    sizes = w.dims(x, 1)
    h, y = w.tensor("arena", sizes), w.tensor("output", sizes)
    again = w.slot(f"arena f32 1 {sizes[0]} reuse {h}")
    w.call("aten::neg.out", f"t:{w.slot(f'input {x}')}", f"t:{h}")
    w.call("aten::add.out", f"t:{h}", f"t:{again}", "i:1", f"t:{again}")
    other = w.tensor("arena", sizes)  # is in nobody's way while the second lives
    w.call("aten::neg.out", f"t:{again}", f"t:{other}")
    w.call("aten::mul.out", f"t:{again}", f"t:{other}", f"t:{y}")
    w.outputs = [y]
    engine = w.engine()
    for n in (1, 5, 100, 0):
        x = torch.randn(n)
        torch.testing.assert_close(engine.try_execute([x])[0], -4 * x * x, rtol=0, atol=0)


def test_slots_of_other_sizes_share_nothing():
    """A column that a sum with a row broadcasts: only where the row has one element is it as large."""
    w = Writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (rows,), (columns,), one = w.dims(x, 1), w.dims(y, 1), w.const(1)
    a, b = w.slot(f"input {x}"), w.slot(f"input {y}")
    h = w.tensor("arena", [rows, one])
    both = w.slot(f"arena f32 2 {rows} {columns} reuse {h}")
    column = w.view(a, [rows, one], [one, one], w.const(0))
    out = w.tensor("output", [rows, columns])
    w.call("aten::neg.out", f"t:{column}", f"t:{h}")
    w.call("aten::add.out", f"t:{h}", f"t:{b}", "i:1", f"t:{both}")
    w.call("aten::neg.out", f"t:{both}", f"t:{out}")
    w.outputs = [out]
    engine = w.engine()
    for n, m in ((5, 1), (40, 30), (1, 1), (3, 7)):
        x, y = torch.randn(n), torch.randn(m)
        assert torch.equal(engine.try_execute([x, y])[0], x[:, None] - y)


def test_memory_does_not_grow_over_random_shapes():
    engine = chain(12).engine(limits={"max_shapes": 16})
    rng = random.Random(0)

    def calls(n: int) -> None:
        for _ in range(n):
            x = torch.ones(rng.randint(1, 80), rng.randint(1, 80))
            assert engine.try_execute([x]) is not None

    calls(1000)
    before = resident_mib()
    calls(3000)
    assert resident_mib() - before < 4


def test_a_large_shape_does_not_hold_its_memory_for_ever():
    engine = chain(4).engine()
    small = torch.ones(2, 2)
    engine.try_execute([small])
    before = resident_mib()
    assert engine.try_execute([torch.ones(4096, 4096)]) is not None
    for _ in range(600):
        engine.try_execute([small])
    assert resident_mib() - before < 40


def test_weights_that_move_are_found_again():
    """share_memory() gives a weight's storage another address."""
    w = Writer()
    x = w.input("f32", 1)
    sizes = w.dims(x, 1)
    y = w.tensor("output", sizes)
    part = w.view(w.slot("const 0"), sizes, [w.const(1)], w.const(1))
    w.call("aten::add.out", f"t:{w.slot(f'input {x}')}", f"t:{part}", "i:1", f"t:{y}")
    w.outputs = [y]
    weight = torch.randn(5)
    engine = w.engine([weight])
    inputs = [torch.randn(4)]
    (first,) = engine.try_execute(inputs)
    weight.share_memory_()
    (second,) = engine.try_execute(inputs)
    assert torch.equal(first, second)
    weight.mul_(2)  # the engine reads the module's weights, not a copy
    (third,) = engine.try_execute(inputs)
    assert torch.equal(third, inputs[0] + weight[1:])


def test_shapes_beyond_the_limit_still_work():
    engine = relu_program().engine(limits={"max_shapes": 2})
    for _ in range(3):
        for rows in range(1, 6):
            x = torch.randn(rows, 4)
            (y,) = engine.try_execute([x])
            assert torch.equal(y, x.relu())

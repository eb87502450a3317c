# SPDX-License-Identifier: Apache-2.0
"""What an engine refuses, and the counter that says so."""

import pytest
import torch
from programs import Writer, relu_program

from blade.core.reason import Code


def refused(engine, inputs) -> str:
    """The one code counted when ``engine`` refuses ``inputs``."""
    before = engine.stats()
    assert engine.try_execute(inputs) is None
    after = engine.stats()
    changed = {key for key in after if after[key] != before.get(key, 0)}
    (code,) = changed - {"calls", "fallbacks"}
    assert after["fallbacks"] == before["fallbacks"] + 1
    return code


def test_accepts_what_it_was_made_for():
    engine = relu_program().engine()
    x = torch.randn(3, 4)
    (y,) = engine.try_execute([x])
    torch.testing.assert_close(y, x.relu(), rtol=0, atol=0)
    assert engine.stats() == {"calls": 1, "engine_runs": 1, "fallbacks": 0}


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ([torch.randn(3, 4, dtype=torch.float64)], Code.GUARD_DTYPE),
        ([torch.randn(3, 4).to("meta")], Code.GUARD_DEVICE),
        ([torch.eye(4).to_sparse()], Code.GUARD_DEVICE),
        ([torch.randn(4)], Code.GUARD_RANK),
        ([], Code.GUARD_RANK),
        ([torch.randn(3, 4), torch.randn(3, 4)], Code.GUARD_RANK),
        ([torch.randn(3, 5)], Code.GUARD_SHAPE),
        ([torch.randn(3, 4, requires_grad=True)], Code.GUARD_GRAD),
    ],
)
def test_refuses(inputs, code):
    engine = relu_program().engine()
    assert refused(engine, inputs) == code.value
    assert engine.try_execute([torch.randn(2, 2)]) is not None


def test_a_gradient_that_nobody_wants_is_no_reason():
    engine = relu_program().engine()
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        (y,) = engine.try_execute([x])
    assert not y.requires_grad


def test_disabled_and_enabled_again():
    engine = relu_program().engine()
    engine.set_enabled(False)
    assert refused(engine, [torch.randn(3, 4)]) == Code.DISABLED.value
    engine.set_enabled(True)
    assert engine.try_execute([torch.randn(3, 4)]) is not None


def test_inputs_need_not_be_contiguous():
    engine = relu_program().engine()
    for x in (torch.randn(4, 3).t(), torch.randn(6, 8)[::2, ::2], torch.randn(1, 4).expand(3, 4)):
        x = x if x.size(1) % 2 == 0 else x.t()
        (y,) = engine.try_execute([x])
        torch.testing.assert_close(y, x.relu(), rtol=0, atol=0)


def test_conjugated_inputs_are_resolved():
    w = Writer()
    x = w.input("c64", 1)
    (n,) = w.dims(x, 1)
    y = w.tensor("output", [n], "c64")
    w.call("aten::neg.out", f"t:{w.slot(f'input {x}')}", f"t:{y}")
    w.outputs = [y]
    value = torch.randn(4, dtype=torch.complex64).conj()
    (got,) = w.engine().try_execute([value])
    torch.testing.assert_close(got, -value, rtol=0, atol=0)


def test_zeros_without_memory_are_read_as_zeros():
    """As autograd makes them of what has no gradient."""
    engine = relu_program().engine()
    (y,) = engine.try_execute([torch._efficientzerotensor(3, 4)])
    assert torch.equal(y, torch.zeros(3, 4))


def test_outputs_are_ordinary_tensors():
    """Also when the first call, which prepares the shape, comes from inference mode."""
    engine = relu_program().engine()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        (first,) = engine.try_execute([x])
        assert torch.equal(first, x.relu())
        assert engine.try_execute([torch.ones(3, 4)]) is not None
    (y,) = engine.try_execute([x])
    assert not y.is_inference() and not y.requires_grad
    weight = torch.randn(3, 4, requires_grad=True)
    (y * weight).sum().backward()
    torch.testing.assert_close(weight.grad, y)
    y.add_(1)
    assert engine.last_error() == ""


@pytest.mark.parametrize("made_under", [False, True])
def test_autocast_goes_to_the_original_or_does_not_reach_into_the_engine(made_under: bool):
    w = Writer()
    x = w.input("f32", 2)
    n, m = w.dims(x, 2)
    strides = [m, w.const(1)]
    y = w.slot(f"dyn f32 2 {n} {m} {strides[0]} {strides[1]}")
    a = w.slot(f"input {x}")
    w.instructions.append(f"call aten::mm 2 t:{a} t:{a} 1 {y}")
    w.outputs = [y]
    value = torch.randn(4, 4)
    want = value @ value
    engine = w.engine(limits={"autocast": int(made_under)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not made_under:
            assert refused(engine, [value]) == Code.GUARD_AUTOCAST.value
        else:
            (got,) = engine.try_execute([value])
            torch.testing.assert_close(got, want)
    (got,) = engine.try_execute([value])
    torch.testing.assert_close(got, want)


REGISTER_CASES = [
    ("add", 7, -3, 4), ("sub", 7, -3, 10), ("mul", 7, -3, -21), ("floordiv", 7, -3, -3),
    ("floordiv", -7, 3, -3), ("floordiv", 7, 3, 2), ("floordiv", 7, 0, 0), ("mod", 7, -3, -2),
    ("mod", -7, 3, 2), ("mod", 7, 0, 0), ("min", 7, -3, -3), ("max", 7, -3, 7), ("eq", 7, 7, 1),
    ("ne", 7, 7, 0), ("lt", 7, 7, 0), ("le", 7, 7, 1), ("gt", 7, -3, 1), ("ge", -3, 7, 0),
    ("and", 7, 0, 0), ("and", 7, 2, 1), ("or", 0, 0, 0), ("or", 0, 2, 1),
    ("floordiv", -(2**63), -1, -(2**63)), ("mod", -(2**63), -1, 0),
]  # fmt: skip


def check_register(text, value):
    """The register that ``text(writer)`` defines has this value: a guard asks for it."""
    w = Writer()
    x = w.input("f32", 0)
    defined = text(w)
    result = w.reg(defined)
    w.guard(w.reg(f"eq {result} {w.const(value)}"), f"{defined} == {value}")
    y = w.tensor("output", [])
    w.call("aten::relu.out", f"t:{w.slot(f'input {x}')}", f"t:{y}")
    w.outputs = [y]
    assert w.engine().try_execute([torch.tensor(2.0)]) is not None


@pytest.mark.parametrize(("op", "a", "b", "value"), REGISTER_CASES)
def test_register_operations(op, a, b, value):
    check_register(lambda w: f"{op} {w.const(a)} {w.const(b)}", value)


ROOT_CASES = [
    (0, 0),
    (1, 1),
    (3, 1),
    (4, 2),
    (196, 14),
    (-9, 0),
    ((3 * 10**9) ** 2 - 1, 3 * 10**9 - 1),
    (2**63 - 1, 3037000499),
]


@pytest.mark.parametrize(("size", "value"), ROOT_CASES)
def test_the_root_of_a_size(size, value):
    check_register(lambda w: f"root {w.const(size)}", value)


SCALE_CASES = [
    (7, "1.7", 11), (10, "0.6", 6), (5, "0.0", 0), (3, "0.3333333333333333", 1), (-7, "1.5", -10),
    (4, "1e300", 0), (2, "inf", 0), (2, "nan", 0),
]  # fmt: skip


@pytest.mark.parametrize(("size", "factor", "value"), SCALE_CASES)
def test_a_size_times_a_float(size, factor, value):
    check_register(lambda w: f"scale {w.const(size)} {factor}", value)

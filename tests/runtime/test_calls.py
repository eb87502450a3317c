# SPDX-License-Identifier: Apache-2.0
"""ATen ops inside a program: arguments of every kind, views, results with their own strides."""

import pytest
import torch
from programs import Writer


def contiguous(w: Writer, sizes: list[int]) -> list[int]:
    strides = [w.const(1)]
    for size in reversed(sizes[1:]):
        strides.insert(0, w.reg(f"mul {strides[0]} {size}"))
    return strides[: len(sizes)]


def dyn(w: Writer, sizes: list[int], dtype: str = "f32") -> int:
    strides = contiguous(w, sizes)
    return w.slot(f"dyn {dtype} {' '.join(map(str, [len(sizes), *sizes, *strides]))}")


def matrix(w: Writer) -> tuple[int, int, int]:
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    return w.slot(f"input {x}"), rows, columns


def check(w: Writer, inputs, expected, constants=()):
    """Twice per shape, so that the prepared frame is used as well."""
    engine = w.engine(constants)
    assert engine.why_unavailable() == ""
    for _ in range(2):
        got = engine.try_execute(list(inputs))
        assert got is not None, engine.last_error()
        assert len(got) == len(expected)
        for g, e in zip(got, expected):
            torch.testing.assert_close(g, e)
            assert g.stride() == e.stride()
    return engine


def test_addmm_out_into_the_arena_then_softmax():
    w = Writer()
    a, rows, _ = matrix(w)
    weight, bias = w.slot("const 0"), w.slot("const 1")
    n = w.const(5)
    h = w.tensor("arena", [rows, n])
    y = w.tensor("output", [rows, n])
    w.call("aten::addmm.out", f"t:{bias}", f"t:{a}", f"t:{weight}", "i:1", "i:1", f"t:{h}")
    w.call("aten::_softmax.out", f"t:{h}", "i:-1", "b:0", f"t:{y}")
    w.outputs = [y]
    constants = [torch.randn(7, 5), torch.randn(5)]
    for rows_now in (1, 3, 8):
        x = torch.randn(rows_now, 7)
        want = torch.addmm(constants[1], x, constants[0]).softmax(-1)
        check(w, [x], [want], constants)


def test_layer_norm_with_lists_floats_and_bools():
    w = Writer()
    a, rows, columns = matrix(w)
    y = dyn(w, [rows, columns])
    w.call("aten::layer_norm", f"t:{a}", f"li:r{columns}", "n", "n", "f:1e-05", "b:1", results=(y,))
    w.outputs = [y]
    x = torch.randn(4, 6)
    check(w, [x], [torch.layer_norm(x, [6])])


def test_an_op_with_several_results():
    w = Writer()
    a, rows, _ = matrix(w)
    two = w.const(2)
    values, indices = dyn(w, [rows, two]), dyn(w, [rows, two], "i64")
    w.call("aten::topk", f"t:{a}", "i:2", "i:-1", "b:1", "b:1", results=(values, indices))
    w.outputs = [indices, values]
    x = torch.randn(4, 6)
    want = x.topk(2)
    check(w, [x], [want.indices, want.values])


def test_an_op_that_returns_a_list():
    w = Writer()
    a, rows, columns = matrix(w)
    half = w.reg(f"floordiv {columns} {w.const(2)}")
    left, right = dyn(w, [rows, half]), dyn(w, [rows, half])
    w.call("aten::split.Tensor", f"t:{a}", f"r:{half}", "i:1", results=(left, right))
    w.outputs = [right, left]
    x = torch.randn(4, 6)
    first, second = x.split(3, 1)
    check(w, [x], [second.contiguous(), first.contiguous()])


def test_lists_of_tensors_and_of_optional_tensors():
    w = Writer()
    a, rows, columns = matrix(w)
    index = w.slot("const 0")
    doubled = w.reg(f"add {columns} {columns}")
    both = w.tensor("arena", [rows, doubled])
    picked = dyn(w, [rows, w.const(3)])
    w.call("aten::cat.out", f"lt:{a},{a}", "i:1", f"t:{both}")
    w.call("aten::index.Tensor", f"t:{both}", f"lo:n,{index}", results=(picked,))
    w.outputs = [picked]
    x = torch.randn(4, 6)
    chosen = torch.tensor([0, 7, 3])
    check(w, [x], [torch.cat([x, x], 1)[:, chosen].contiguous()], [chosen])


def test_device_dtype_and_string_arguments():
    w = Writer()
    a, rows, columns = matrix(w)
    ids = dyn(w, [columns], "i64")
    quotient = dyn(w, [rows, columns])
    w.call("aten::arange", f"r:{columns}", "dt:i64", "n", "d:cpu", "b:0", results=(ids,))
    w.call("aten::div.Tensor_mode", f"t:{a}", f"t:{ids}", "s:floor", results=(quotient,))
    w.outputs = [quotient, ids]
    x = torch.randn(4, 6)
    check(w, [x], [torch.div(x, torch.arange(6), rounding_mode="floor"), torch.arange(6)])


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "0.1", "1e-30", "-2.5e+10"])
def test_float_arguments(text):
    w = Writer()
    a, rows, columns = matrix(w)
    y = w.tensor("output", [rows, columns])
    w.call("aten::add.Scalar_out", f"t:{a}", f"f:{text}", "i:1", f"t:{y}")
    w.outputs = [y]
    x = torch.randn(2, 3)
    torch.testing.assert_close(
        w.engine().try_execute([x])[0], x + float(text), rtol=0, atol=0, equal_nan=True
    )


def test_views_of_arena_constant_input_and_of_a_view():
    """x -> relu (arena), its transpose, columns 1.. of that; plus a constant's second row."""
    w = Writer()
    a, rows, columns = matrix(w)
    one, zero = w.const(1), w.const(0)
    fewer = w.reg(f"sub {rows} {one}")
    h = w.tensor("arena", [rows, columns])
    turned = w.view(h, [columns, rows], [one, columns], zero)
    part = w.view(turned, [columns, fewer], [one, columns], columns)
    column = w.view(w.slot("const 0"), [columns, fewer], [zero, one], columns)
    y = w.tensor("output", [columns, fewer])
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.call("aten::add.out", f"t:{part}", f"t:{column}", "i:1", f"t:{y}")
    w.outputs = [y]
    x, constant = torch.randn(4, 4), torch.randn(2, 4)
    want = x.relu().t()[:, 1:] + constant[1, :3]
    check(w, [x], [want.contiguous()], [constant])


def test_a_view_of_an_input_is_returned_as_such():
    w = Writer()
    a, rows, columns = matrix(w)
    turned = w.view(a, [columns, rows], [w.const(1), columns], w.const(0))
    w.outputs = [turned, a]
    engine = w.engine()
    x = torch.randn(3, 4)
    view, same = engine.try_execute([x])
    assert same is x
    assert torch.equal(view, x.t()) and view.data_ptr() == x.data_ptr()
    version = view._version
    x.add_(1)
    assert torch.equal(view, x.t()) and view._version > version
    # a contiguous copy could not be a view of the caller's tensor: let the original do it
    assert engine.try_execute([x.t()]) is None
    assert engine.stats()["guard_shape"] == 1


def test_an_output_in_the_arena_is_copied():
    w = Writer()
    a, rows, columns = matrix(w)
    h = w.tensor("arena", [rows, columns])
    turned = w.view(h, [columns, rows], [w.const(1), columns], w.const(0))
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.outputs = [turned]
    engine = w.engine()
    x = torch.randn(3, 4)
    (first,) = engine.try_execute([x])
    engine.try_execute([torch.ones(3, 4)])
    assert torch.equal(first, x.relu().t())


def test_a_result_that_aliases_the_arena_is_copied():
    w = Writer()
    a, rows, columns = matrix(w)
    h = w.tensor("arena", [rows, columns])
    y = dyn(w, [columns, rows])
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.call("aten::t", f"t:{h}", results=(y,))
    w.outputs = [y]
    engine = w.engine()
    x = torch.randn(3, 4)
    (first,) = engine.try_execute([x])
    engine.try_execute([torch.ones(3, 4)])
    assert torch.equal(first, x.relu().t())


def test_results_without_memory_become_zeros():
    w = Writer()
    _, rows, columns = matrix(w)
    y = dyn(w, [rows, columns])
    size = f"li:r{rows},r{columns}"
    w.call("aten::_efficientzerotensor", size, "dt:f32", "n", "d:cpu", "n", results=(y,))
    w.outputs = [y]
    (got,) = w.engine().try_execute([torch.randn(3, 4)])
    assert not got._is_zerotensor() and torch.equal(got, torch.zeros(3, 4))


def test_results_that_are_conjugated_when_read_are_resolved():
    """As those of inverse transforms of real numbers are."""
    w = Writer()
    x = w.input("c64", 2)
    rows, columns = w.dims(x, 2)
    h, y, z = (dyn(w, [rows, columns], "c64") for _ in range(3))
    w.call("aten::neg", f"t:{w.slot(f'input {x}')}", results=(h,))
    w.call("aten::_conj", f"t:{h}", results=(y,))
    w.call("aten::exp", f"t:{y}", results=(z,))
    w.outputs = [y, z]
    value = torch.randn(3, 4, dtype=torch.complex64)
    for got, want in zip(w.engine().try_execute([value]), (-value.conj(), (-value.conj()).exp())):
        assert not got.is_conj()
        torch.testing.assert_close(got, want)


def test_results_are_restrided():
    w = Writer()
    a, rows, columns = matrix(w)
    y = dyn(w, [columns, rows])
    w.call("aten::t", f"t:{a}", results=(y,))
    w.outputs = [y]
    x = torch.randn(3, 4)
    check(w, [x], [x.t().contiguous()])


@pytest.mark.parametrize(
    ("dtype", "op", "what"),
    [("f64", "aten::relu", "expected"), ("f32", "aten::t", "expected")],
)
def test_a_result_that_was_not_promised_raises(dtype, op, what):
    w = Writer()
    a, rows, columns = matrix(w)
    y = dyn(w, [rows, columns], dtype)
    w.call(op, f"t:{a}", results=(y,))
    w.outputs = [y]
    engine = w.engine()
    assert engine.try_execute([torch.randn(3, 4)]) is None
    assert engine.stats()["engine_raised"] == 1
    assert what in engine.last_error()


@pytest.mark.parametrize("kind", ["arena", "output"])
def test_an_out_argument_of_the_wrong_size_raises_each_time(kind):
    w = Writer()
    a, _, columns = matrix(w)
    wrong = w.tensor(kind, [columns, columns])
    w.call("aten::relu.out", f"t:{a}", f"t:{wrong}")
    w.outputs = [wrong]
    engine = w.engine()
    for n in (1, 2):
        assert engine.try_execute([torch.randn(3, 4)]) is None
        assert engine.stats()["engine_raised"] == n
    assert engine.try_execute([torch.randn(4, 4)]) is not None


def test_a_view_outside_its_base_raises():
    w = Writer()
    a, rows, columns = matrix(w)
    outside = w.view(a, [rows, columns], [columns, w.const(1)], w.const(1))
    w.outputs = [outside]
    engine = w.engine()
    assert engine.try_execute([torch.randn(3, 4)]) is None
    assert "outside its base" in engine.last_error()


def test_empty_tensors():
    w = Writer()
    a, rows, columns = matrix(w)
    h, y = w.tensor("arena", [rows, columns]), w.tensor("output", [rows, columns])
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.call("aten::exp.out", f"t:{h}", f"t:{y}")
    w.outputs = [y]
    check(w, [torch.empty(0, 4)], [torch.empty(0, 4)])
    check(w, [torch.empty(3, 0)], [torch.empty(3, 0)])


def test_profile_names_every_instruction():
    w = Writer()
    a, rows, columns = matrix(w)
    h, y = w.tensor("arena", [rows, columns]), w.tensor("output", [rows, columns])
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.call("aten::exp.out", f"t:{h}", f"t:{y}")
    w.outputs = [y]
    texts, seconds = w.engine().profile([torch.randn(3, 4)], 5)
    assert texts == w.instructions
    assert len(seconds) == 2 and all(s > 0 for s in seconds)
    with pytest.raises(RuntimeError, match="guard_dtype"):
        w.engine().profile([torch.ones(3, 4, dtype=torch.int64)], 5)

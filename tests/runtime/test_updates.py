# SPDX-License-Identifier: Apache-2.0
"""Inputs that a program writes to: what it may, what it refuses, and what is left when it fails."""

import pytest
import torch
from programs import Writer


def accumulate(extra: str | None = None, returned: bool = True) -> Writer:
    """x += y, and x @ x of before; ``extra`` is a further call."""
    w = Writer()
    x, y = w.input("f32", 2), w.input("f32", 2)
    sizes = w.dims(x, 2)
    a, b = w.slot(f"input {x}"), w.slot(f"input {y}")
    total, squared = w.tensor("arena", sizes), w.tensor("output", sizes)
    w.call("aten::add.out", f"t:{a}", f"t:{b}", "i:1", f"t:{total}")
    w.call("aten::mm.out", f"t:{a}", f"t:{a}", f"t:{squared}")
    into = w.slot(f"update {x}")
    w.call("aten::copy_", f"t:{into}", f"t:{total}", "b:0")
    if extra is not None:
        w.call(extra, f"t:{a}", f"t:{squared}")
    w.outputs = [squared] if returned else [into]
    return w


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
def test_the_caller_sees_the_write_and_the_results_of_before(layout: str) -> None:
    engine = accumulate().engine()
    assert engine.why_unavailable() == ""
    for n in (1, 3, 3, 5):
        x, y = torch.randn(n, n), torch.randn(n, n)
        x = (
            x.T
            if layout == "transposed"
            else torch.randn(2 * n, n)[::2]
            if layout == "slice"
            else x
        )
        before, address, version = x.clone(), x.data_ptr(), x._version
        [squared] = engine.try_execute([x, y])
        torch.testing.assert_close(squared, before @ before)
        torch.testing.assert_close(x, before + y)
        assert x.data_ptr() == address and x._version > version


def test_autograd_hears_of_the_write() -> None:
    leaf = torch.ones(2, 2, requires_grad=True)
    x = torch.randn(2, 2)
    out = leaf * x
    with torch.no_grad():
        assert accumulate().engine().try_execute([x, torch.ones(2, 2)]) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_memory_in_two_places_is_refused_and_left_alone() -> None:
    engine = accumulate().engine()
    whole = torch.randn(6, 4)
    for x, y in (
        (whole[:4], whole[:4]),
        (whole[:4], whole[2:]),
        (whole[2:], whole[:4]),
        (torch.randn(4, 1).expand(4, 4), torch.randn(4, 4)),
    ):
        before = x.clone()
        assert engine.try_execute([x, y]) is None
        assert torch.equal(x, before)
    assert engine.stats()["guard_shape"] == 4
    assert engine.try_execute([torch.randn(4, 4), whole[:4]]) is not None


def test_memory_of_a_constant_is_not_written() -> None:
    w = accumulate()
    held = torch.randn(4, 4)
    w.slot("const 0")
    engine = w.engine([held])
    assert engine.try_execute([held, torch.ones(4, 4)]) is None
    assert engine.try_execute([held.clone(), held]) is not None  # both are only read


def test_a_tensor_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        x = torch.randn(2, 2)
    assert accumulate().engine().try_execute([x, torch.ones(2, 2)]) is None


def test_a_failure_comes_before_the_write() -> None:
    engine = accumulate().engine()
    x, y = torch.randn(3, 4), torch.randn(3, 4)  # only square matrices multiply
    before = x.clone()
    assert engine.try_execute([x, y]) is None
    assert engine.stats()["engine_raised"] == 1
    assert torch.equal(x, before)


def test_nothing_is_updated_of_no_elements() -> None:
    engine = accumulate().engine()
    [squared] = engine.try_execute([torch.randn(0, 0), torch.randn(0, 0)])
    assert squared.shape == (0, 0)


def written_first(reads: bool = False) -> Writer:
    """The first row of x is written, then x @ x of after is computed, which fails unless x is square."""
    w = Writer()
    x, y = w.input("f32", 2), w.input("f32", 1)
    sizes = w.dims(x, 2)
    into, row = w.slot(f"update {x} again"), w.slot(f"input {y}")
    one, zero = w.const(1), w.const(0)
    first = w.slot(f"view {into} 1 {sizes[1]} {one} {zero}")
    squared = w.tensor("output", sizes)
    w.call("aten::copy_", f"t:{first}", f"t:{row}", "b:0")
    w.call("aten::mm.out", f"t:{into}", f"t:{into}", f"t:{squared}")
    if reads:
        w.call("aten::relu.out", f"t:{w.slot(f'input {x}')}", f"t:{squared}")
    w.outputs = [squared]
    return w


def test_what_may_be_written_again_is_read_after_it_was_written() -> None:
    engine = written_first().engine()
    assert engine.why_unavailable() == ""
    x, row = torch.randn(3, 3), torch.randn(3)
    want = torch.cat([row[None], x[1:]])
    [squared] = engine.try_execute([x, row])
    torch.testing.assert_close(x, want)
    torch.testing.assert_close(squared, want @ want)
    wide = torch.randn(3, 4)
    want = wide.clone()
    assert engine.try_execute([wide, torch.ones(4)]) is None  # only square matrices multiply
    want[0] = 1  # as the original does, once it has run
    torch.testing.assert_close(wide, want)


def test_what_may_be_written_again_is_read_by_no_other_name() -> None:
    assert "input 0 is read beside slot 0" in written_first(reads=True).engine().why_unavailable()


def broken() -> dict[str, Writer]:
    late, returned = accumulate("aten::relu.out"), accumulate(returned=False)
    twice, idle, reader = accumulate(), accumulate(), accumulate()
    twice.call("aten::copy_", f"t:{twice.slot('update 0')}", "t:2", "b:0")
    idle.slot("update 1")
    reader.call("aten::copy_", f"t:{reader.slot('update 1')}", "t:0", "b:0")
    scratch = accumulate()
    zero, some = scratch.const(0), scratch.const(64)
    scratch.kernel("k", zero, zero, some, [2], [])
    return {
        "read after it was written": reader,
        "may fail after an input was written": scratch,
        "input 0 is read after": late,
        "cannot be returned": returned,
        "updated twice": twice,
        "is never written": idle,
    }


@pytest.mark.parametrize("why", broken())
def test_programs_that_would_lose_an_input_do_not_load(why: str) -> None:
    assert why in broken()[why].engine().why_unavailable()


def test_a_call_that_may_fail_after_the_write() -> None:
    w = accumulate()
    y = w.tensor("output", w.dims(0, 2))
    w.call("aten::relu.out", "t:1", f"t:{y}")
    assert "may fail after an input was written" in w.engine().why_unavailable()

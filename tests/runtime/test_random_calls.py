# SPDX-License-Identifier: Apache-2.0
"""Calls that draw random numbers: from torch's generator, which a run that fails leaves as it found it."""

import pytest
import torch
from programs import Writer


def mask_times_itself(drawing: bool = True) -> Writer:
    """A mask of x, and mask @ mask, which only a square one can be multiplied with."""
    w = Writer()
    x = w.input("f32", 2)
    sizes = w.dims(x, 2)
    one = w.const(1)
    mask = w.slot(f"dyn f32 2 {sizes[0]} {sizes[1]} {sizes[1]} {one}")
    product = w.tensor("output", [sizes[0], sizes[0]])
    a = w.slot(f"input {x}")
    w.call("aten::bernoulli.p", f"t:{a}", "f:0.5", "n", results=(mask,))
    if drawing:
        w.instructions[-1] = f"draw {w.instructions[-1]}"
    w.call("aten::mm.out", f"t:{mask}", f"t:{mask}", f"t:{product}")
    w.outputs = [mask, product]
    return w


def test_it_draws_what_eager_draws() -> None:
    engine, x = mask_times_itself().engine(), torch.randn(5, 5)
    torch.manual_seed(1)
    want = [torch.bernoulli(x, 0.5) for _ in range(3)]
    torch.manual_seed(1)
    got = [engine.try_execute([x]) for _ in range(3)]
    for (mask, product), expected in zip(got, want, strict=True):
        assert torch.equal(mask, expected) and torch.equal(product, expected @ expected)


def test_who_runs_instead_of_a_run_that_failed_draws_the_same() -> None:
    engine, bad = mask_times_itself().engine(), torch.randn(3, 4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert engine.try_execute([bad]) is None
    assert engine.stats()["engine_raised"] == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_only_calls_draw() -> None:
    w = mask_times_itself()
    w.instructions[-1] = "draw kernel k 0 0 0 0 0"
    assert "only a call can draw" in w.engine().why_unavailable()


@pytest.mark.parametrize("given", ["n", "t:0"])
def test_a_parameter_that_is_no_optional_tensor_takes_none(given: str) -> None:
    """As Python's None does: it becomes an undefined tensor, which the op then finds or does not look at."""
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    a, one = w.slot(f"input {x}"), w.const(1)
    y = w.slot(f"dyn f32 1 {n} {one}")
    w.call("aten::add.Tensor", f"t:{a}", given, "i:1", results=(y,))
    w.outputs = [y]
    engine = w.engine()
    found = engine.try_execute([torch.ones(2)])
    if given == "n":
        assert found is None and "undefined" in engine.last_error().lower()
    else:
        assert found[0].tolist() == [2, 2]

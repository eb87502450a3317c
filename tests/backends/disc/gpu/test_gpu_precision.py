# SPDX-License-Identifier: Apache-2.0
"""Which values of float32 are computed by fast forms: those that memory sees as 16 bits alone."""

from dataclasses import replace

import pytest
import torch
from test_cpu_kernels import BF16, F16, F32, S0, S1, _args, gelu
from test_gpu_many_programs import in_halves
from triton_interpreter import TARGET, run

from blade.backends.disc.gpu.emit.fast_math import beside_one, hidden
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Compute,
    Kernel,
    Load,
    Reduce,
    Stmt,
    Store,
)

EXP, SUM, DIV = 4, 5, 6


def softmax(dtype: torch.dtype, more: tuple[Stmt, ...] = ()) -> Kernel:
    """In float32 between halves; ``more`` comes before what is stored."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (S1, 1)), dtype),
        Compute("cast", (0,), F32),
        Reduce("max", 1, F32),
        Compute("sub", (1, 2), F32),
        Compute("exp", (3,), F32),
        Reduce("sum", 4, F32),
        Compute("div", (4, 5), F32),
        *more,
        Compute("cast", (6 + len(more),), dtype),
        Store(Access(1, (S1, 1)), 7 + len(more)),
    )
    return Kernel((S0,), S1, _args([dtype], [dtype]), body)


def test_a_softmax_that_is_stored_in_halves() -> None:
    assert hidden(softmax(F16)) == {EXP, SUM, DIV}
    assert hidden(softmax(F16, (Compute("mul", (6, 6), F32),))) == {EXP, SUM, DIV, 7}


def test_not_what_is_stored_in_float32_or_may_cancel_or_jump() -> None:
    assert not hidden(softmax(F32))
    wide = softmax(F16)
    stored = Kernel(
        wide.outer, S1, _args([F16], [F16, F32]), (*wide.body, Store(Access(2, (S1, 1)), DIV))
    )
    assert not hidden(stored)
    for op in ("sub", "floor"):
        args = (6, 4) if op == "sub" else (6,)
        assert hidden(softmax(F16, (Compute(op, args, F32),))) == {7}


@pytest.mark.needs("triton_interpreter")
def test_an_error_function_that_one_is_added_to() -> None:
    kernel = in_halves(gelu(768))
    (erf,) = [i for i, s in enumerate(kernel.body) if isinstance(s, Compute) and s.op == "erf"]
    assert beside_one(kernel) == {erf}
    alone = replace(kernel, body=(*kernel.body[: erf + 1], Store(Access(2, (768, 1)), erf)))
    assert not beside_one(alone)
    x = torch.cat([torch.linspace(-6, 6, 767), torch.tensor([1e-4])]).to(F16)
    zero = torch.zeros(768, dtype=F16)
    for one, function, near in (
        (
            kernel,
            torch.nn.functional.gelu,
            2e-7,
        ),  # 1 + erf(x) in float32, where erf(x) is almost -1
        (alone, lambda x: (x / 2**0.5).erf(), 3e-8),
    ):
        out = torch.zeros(768, dtype=F16)
        run(one, emit(one, TARGET), [x, zero, out], {"s0": 1})
        torch.testing.assert_close(out.double(), function(x.double()), rtol=5e-4, atol=near)


@pytest.mark.needs("triton_interpreter")
@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
@pytest.mark.parametrize("width", (5, 384, 1000, 5000))
def test_values_are_those_of_float64_rounded_once(dtype: torch.dtype, width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x = (10 * torch.randn(4, width, generator=rng)).to(dtype)
    out, kernel = torch.zeros(4 * width, dtype=dtype), softmax(dtype)
    choices = emit(kernel, TARGET)
    assert not any("div_rn" in c.unit.text or "libdevice.exp" in c.unit.text for c in choices)
    run(kernel, choices, [x.flatten(), out], {"s0": 4, "s1": width})
    want = x.double().softmax(-1).flatten()
    off = (out.double() - want).abs() / (want.abs() * torch.finfo(dtype).eps).clamp_min(1e-7)
    assert off.max() <= 0.51

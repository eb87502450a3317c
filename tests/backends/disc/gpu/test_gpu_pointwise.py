# SPDX-License-Identifier: Apache-2.0
"""Every pointwise op in every dtype it supports, in Triton's interpreter against torch."""

import pytest
import torch
from cpu_native import pointwise_kernel, samples, symbol
from test_cpu_pointwise import DTYPES, _inputs, _result, _sources, _ulps
from triton_interpreter import TARGET, check, run

from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.emit.pointwise import supports
from blade.backends.disc.ir.kernel import (
    POINTWISE,
    Access,
    Arg,
    Compute,
    Const,
    Kernel,
    Load,
    Store,
)
from blade.backends.disc.reference.interpret_kernel import pointwise, working
from blade.errors import Refused

pytestmark = pytest.mark.needs("triton_interpreter")

EXACT = set("eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf".split())


@pytest.mark.parametrize("op", [op for op in POINTWISE if op != "cast"])
def test_values(op: str) -> None:
    rng = torch.Generator().manual_seed(0)
    for dtype in filter(lambda d: supports(op, d), DTYPES):
        inputs = _inputs(op, dtype, rng)
        kernel = pointwise_kernel(op, _sources(op, dtype), _result(op, dtype))
        out = torch.zeros(len(inputs[0]), dtype=_result(op, dtype))
        run(kernel, emit(kernel, TARGET), [*inputs, out], {"s0": len(out)})
        want = pointwise(op, [x.to(working(x.dtype)) for x in inputs])
        if not dtype.is_floating_point or op in EXACT:
            assert torch.equal(out, want.to(out.dtype)), (op, dtype)
            continue
        exact = pointwise(op, [x.double() if x.is_floating_point() else x for x in inputs])
        error = torch.minimum(_ulps(out, exact), _ulps(out, want.to(out.dtype).double()))
        worst = int(error.argmax())
        assert error[worst] <= 4.0, (op, dtype, [x[worst].item() for x in inputs], out[worst])


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_cast(source: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    x = samples(source, 101, rng).abs() if source != torch.bool else samples(source, 101, rng)
    for dtype in DTYPES:
        kernel, out = pointwise_kernel("cast", [source], dtype), torch.zeros(101, dtype=dtype)
        run(kernel, emit(kernel, TARGET), [x, out], {"s0": 101})
        assert torch.equal(out, x.to(dtype)), (dtype, x, out, x.to(dtype))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_half_value_is_rounded_once_and_before_a_cast(dtype: torch.dtype) -> None:
    """(x + y) * y in float32, rounded to 16 bits before it becomes float32."""
    body = (
        Load(Access(0, (1,)), dtype),
        Load(Access(1, (1,)), dtype),
        Compute("add", (0, 1), dtype),
        Compute("mul", (2, 1), dtype),
        Compute("cast", (3,), torch.float32),
        Store(Access(2, (1,)), 4),
        Store(Access(3, (1,)), 3),
    )
    dtypes = (dtype, dtype, torch.float32, dtype)
    args = tuple(Arg(d, k > 1) for k, d in enumerate(dtypes))
    rng = torch.Generator().manual_seed(2)
    buffers = [torch.randn(301, generator=rng).to(d) for d in dtypes]
    check(Kernel((), symbol("s0"), args, body), buffers, {"s0": 301})


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64), ids=str)
def test_pow_with_a_constant_exponent_is_torchs(dtype: torch.dtype) -> None:
    exponents = (2, 3, 5) if dtype == torch.int64 else (2.0, 3.0, 0.5, -0.5, -1.0, 1.5)
    for exponent in exponents:
        load, constant = Load(Access(0, (1,)), dtype), Const(exponent, dtype)
        body = (load, constant, Compute("pow", (0, 1), dtype), Store(Access(1, (1,)), 2))
        kernel = Kernel((), symbol("s0"), (Arg(dtype, False), Arg(dtype, True)), body)
        x = samples(dtype, 37, torch.Generator().manual_seed(3))
        out = torch.zeros_like(x)
        choices = emit(kernel, TARGET)
        run(kernel, choices, [x, out], {"s0": 37})
        torch.testing.assert_close(out, x**exponent, equal_nan=True)
        assert ("libdevice.pow" in choices[0].unit.text) == (exponent == 1.5)


@pytest.mark.parametrize("value", (0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1e-300))
def test_constants_are_exact(value: float) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        body = (Const(value, dtype), Store(Access(0, (1,)), 0))
        kernel = Kernel((), 5, (Arg(dtype, True),), body)
        out = torch.ones(5, dtype=dtype)
        run(kernel, emit(kernel, TARGET), [out], {})
        want = torch.full((5,), value, dtype=dtype)
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit(), want.signbit()) or value != value


def test_unsupported_is_refused_and_supports_agrees() -> None:
    assert not supports("exp", torch.int64)
    assert not supports("add", torch.complex64)
    with pytest.raises(Refused, match="no exp for int64") as caught:
        emit(pointwise_kernel("exp", [torch.int64], torch.int64), TARGET)
    assert caught.value.code == "unsupported_dtype"
    with pytest.raises(Refused, match="no complex64 buffers"):
        emit(pointwise_kernel("add", [torch.complex64] * 2, torch.complex64), TARGET)


def test_every_op_the_cpu_has_is_there() -> None:
    from blade.backends.disc.cpu.emit.pointwise import supports as on_cpu

    missing = [(op, d) for op in POINTWISE for d in DTYPES if on_cpu(op, d) and not supports(op, d)]
    assert missing == []

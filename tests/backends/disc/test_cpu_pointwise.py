# SPDX-License-Identifier: Apache-2.0
"""Every pointwise op in every dtype it supports, against torch: values, special values, refusals."""

import math

import pytest
import torch
from cpu_native import Native, pointwise_kernel, samples, symbol

from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.cpu.emit.pointwise import supports
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
from blade.backends.disc.target.cpu import host
from blade.errors import Refused

pytestmark = pytest.mark.needs("torch_mlir")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TESTS = "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf".split()
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 1e-40, -1e-40, 3e38)
SPECIAL += (
    -3e38,
    88.7,
    89.5,
    -87.4,
    -103.9,
    -110.0,
    10.0,
    -10.0,
    2.5,
    3.5,
    -2.5,
    1e-20,
    1e10,
    2e13,
)
ULPS = {"pow": 8.0, "sigmoid": 5.0, "erfc": 8.0}


def _sources(op: str, dtype: torch.dtype) -> list[torch.dtype]:
    return [torch.bool, dtype, dtype] if op == "where" else [dtype] * POINTWISE[op]


def _result(op: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if op in TESTS else dtype


def _kernels(op: str) -> dict[str, tuple[torch.dtype, Native]]:
    kept = [d for d in DTYPES if supports(op, d)]
    names = {f"{op}_{str(d).removeprefix('torch.')}": d for d in kept}
    native = Native(
        {n: pointwise_kernel(op, _sources(op, d), _result(op, d)) for n, d in names.items()}
    )
    return {n: (d, native) for n, d in names.items()}


def _inputs(op: str, dtype: torch.dtype, rng: torch.Generator) -> list[torch.Tensor]:
    """Random operands, and every pair of special values."""
    columns = [samples(d, 203, rng) for d in _sources(op, dtype)]
    if not dtype.is_floating_point:
        if op in ("lshift", "rshift", "pow"):
            columns[1] = torch.randint(0 if op == "pow" else -2, 12, (203,), generator=rng).to(
                dtype
            )
        return columns
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    if len(columns) == 1:
        return [torch.cat([columns[0], special])]
    first = special.repeat_interleave(len(special))
    second = special.repeat(len(special))
    return [
        torch.cat([columns[0], first != 0 if columns[0].dtype == torch.bool else first]),
        torch.cat([columns[1], second]),
        *(torch.cat([c, second.flip(0)]) for c in columns[2:]),
    ]


def _ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last place of ``got``'s dtype; 0 where both are the same inf or NaN."""
    info = torch.finfo(got.dtype)
    rounded = exact.to(got.dtype)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    unit = torch.clamp(exact.abs(), min=info.tiny) * info.eps
    distance = (got.double() - exact).abs() / unit
    return torch.where(same, 0.0, torch.nan_to_num(distance, nan=math.inf))


@pytest.mark.parametrize("op", [op for op in POINTWISE if op != "cast"])
def test_values(op: str) -> None:
    rng = torch.Generator().manual_seed(0)
    for name, (dtype, native) in _kernels(op).items():
        inputs = _inputs(op, dtype, rng)
        out = torch.zeros(len(inputs[0]), dtype=_result(op, dtype))
        native.run(name, [*inputs, out], {"s0": len(out)})
        wide = [x.to(working(x.dtype)) for x in inputs]
        if not dtype.is_floating_point or op in TESTS:
            want = pointwise(op, wide)
            assert torch.equal(out, want.to(out.dtype)), (
                name,
                _first_difference(inputs, out, want),
            )
            continue
        exact = pointwise(op, [x.double() if x.is_floating_point() else x for x in inputs])
        torch_own = pointwise(op, wide)
        error = torch.minimum(_ulps(out, exact), _ulps(out, torch_own.to(out.dtype).double()))
        worst = int(error.argmax())
        operands = [x[worst].item() for x in inputs]
        message = f"{name}{operands} = {out[worst]} not {torch_own[worst]} ({error[worst]:.1f} ulp)"
        assert error[worst] <= ULPS.get(op, 4.0), message


def _first_difference(inputs: list[torch.Tensor], got: torch.Tensor, want: torch.Tensor) -> str:
    k = int((got != want.to(got.dtype)).nonzero()[0])
    return f"{[x[k].item() for x in inputs]} gave {got[k].item()}, torch {want[k].item()}"


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_cast(source: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    names = {f"to_{str(d).removeprefix('torch.')}": d for d in DTYPES}
    native = Native({n: pointwise_kernel("cast", [source], d) for n, d in names.items()})
    x = samples(source, 101, rng).abs() if source != torch.bool else samples(source, 101, rng)
    for name, dtype in names.items():
        out = torch.zeros(101, dtype=dtype)
        native.run(name, [x, out], {"s0": 101})
        assert torch.equal(out, x.to(dtype)), (name, x, out, x.to(dtype))


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    native = Native({"k": pointwise_kernel("cast", [torch.float32], torch.bfloat16)})
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F800001, 0x7F7FFFFF, 1, -1], dtype=torch.int32
    )
    x, out = bits.view(torch.float32), torch.zeros(len(bits), dtype=torch.bfloat16)
    native.run("k", [x, out], {"s0": len(bits)})
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "op",
    "exp exp2 expm1 log log2 log1p tanh erf erfc sigmoid sin cos tan atan asin acos sinh cosh".split(),
)
def test_f32_accuracy_over_the_range(op: str) -> None:
    """All magnitudes: 20,000 values spread over the exponents, against float64."""
    rng = torch.Generator().manual_seed(2)
    exponent = torch.rand(20000, generator=rng) * 60 - 50
    x = torch.exp2(exponent) * torch.where(torch.rand(20000, generator=rng) < 0.5, -1.0, 1.0)
    x = torch.cat([x, torch.randn(20000, generator=rng) * 4])
    native = Native({"k": pointwise_kernel(op, [torch.float32], torch.float32)})
    out = torch.zeros_like(x)
    native.run("k", [x, out], {"s0": len(x)})
    # Where torch's own float32 overflows on the way (sigmoid), its answer is right too.
    exact, torch_own = pointwise(op, [x.double()]), pointwise(op, [x]).double()
    error = torch.minimum(_ulps(out, exact), _ulps(out, torch_own))
    worst = int(error.argmax())
    assert error[worst] <= ULPS.get(op, 4.0), (
        op,
        x[worst].item(),
        out[worst].item(),
        error[worst].item(),
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64), ids=str)
def test_pow_with_a_constant_exponent_is_torchs(dtype: torch.dtype) -> None:
    exponents = (2, 3, 5) if dtype == torch.int64 else (2.0, 3.0, 0.5, -0.5, -1.0, 1.5)
    kernels = {}
    for k, exponent in enumerate(exponents):
        load, constant = Load(Access(0, (1,)), dtype), Const(exponent, dtype)
        body = (load, constant, Compute("pow", (0, 1), dtype), Store(Access(1, (1,)), 2))
        kernels[f"k{k}"] = Kernel((), symbol("s0"), (Arg(dtype, False), Arg(dtype, True)), body)
    native = Native(kernels)
    x = samples(dtype, 37, torch.Generator().manual_seed(3))
    for k, exponent in enumerate(exponents):
        out = torch.zeros_like(x)
        native.run(f"k{k}", [x, out], {"s0": 37})
        torch.testing.assert_close(out, x**exponent, equal_nan=True)
        called = "@pow" in native.emitted[f"k{k}"].text
        assert called == (exponent == 1.5)


def test_unsupported_is_refused_and_supports_agrees() -> None:
    assert not supports("exp", torch.int64)
    assert not supports("add", torch.complex64)
    with pytest.raises(Refused, match="no exp for int64") as caught:
        emit(pointwise_kernel("exp", [torch.int64], torch.int64), "k", host())
    assert caught.value.code == "unsupported_dtype"


def test_every_op_is_supported_in_float32_or_integers() -> None:
    for op in POINTWISE:
        assert supports(op, torch.float32) or supports(op, torch.int64), op

# SPDX-License-Identifier: Apache-2.0
"""The reference semantics themselves, against torch's own ops."""

import torch
from cpu_native import symbol
from test_cpu_kernels import layer_norm, softmax

from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Const,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Store,
)
from blade.backends.disc.reference.interpret_kernel import interpret

S0, S1 = symbol("s0"), symbol("s1")
F32, BF16 = torch.float32, torch.bfloat16


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_softmax() -> None:
    x, out = _randn(4, 7), torch.zeros(28)
    interpret(softmax(), [x.flatten(), out], {"s0": 4, "s1": 7})
    torch.testing.assert_close(out.view(4, 7), x.softmax(-1))


def test_layer_norm_with_bias_and_residual() -> None:
    x, residual, (a, w, b) = _randn(3, 9), _randn(3, 9) + 1, _randn(3, 9)
    out = torch.zeros(27)
    buffers = [x.flatten(), a, residual.flatten(), w, b, out]
    interpret(layer_norm(S1), buffers, {"s0": 3, "s1": 9})
    want = torch.nn.functional.layer_norm(x + a + residual, (9,), w, b, 1e-5)
    torch.testing.assert_close(out.view(3, 9), want)


def test_bfloat16_is_rounded_only_at_the_store_and_at_casts() -> None:
    load = Load(Access(0, (1,)), BF16)
    third = Const(1 / 3, BF16)
    product, back = Compute("mul", (0, 1), BF16), Compute("mul", (2, 1), BF16)
    args = (Arg(BF16, False), Arg(BF16, True))
    body = (load, third, product, back, Store(Access(1, (1,)), 3))
    x, out = _randn(50).bfloat16(), torch.zeros(50, dtype=BF16)
    interpret(Kernel((), S0, args, body), [x, out], {"s0": 50})
    assert torch.equal(out, (x.float() * (1 / 3) * (1 / 3)).bfloat16())
    cast = (load, third, product, Compute("cast", (2,), BF16), Compute("mul", (3, 1), BF16))
    interpret(Kernel((), S0, args, (*cast, Store(Access(1, (1,)), 4))), [x, out], {"s0": 50})
    assert torch.equal(out, ((x.float() * (1 / 3)).bfloat16().float() * (1 / 3)).bfloat16())


def test_index_size_and_row_values_of_empty_rows() -> None:
    body = (
        Load(Access(0, (S1, 1)), F32),
        Reduce("max", 0, F32),
        Index(0, F32),
        Size(S1 + 2, F32),
        Compute("mul", (2, 3), F32),
        Compute("maximum", (1, 4), F32),
        Store(Access(1, (1, 0)), 5),
    )
    kernel = Kernel((S0,), S1, (Arg(F32, False), Arg(F32, True)), body)
    out = torch.zeros(3)
    interpret(kernel, [torch.zeros(0), out], {"s0": 3, "s1": 0})
    assert out.tolist() == [0.0, 2.0, 4.0]
    x = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    interpret(kernel, [x, out], {"s0": 3, "s1": 2})
    assert out.tolist() == [9.0, 4.0, 8.0]


def test_loads_see_the_buffer_as_it_was() -> None:
    """Swap through two stores into the two inputs."""
    body = (
        Load(Access(0, (1,)), F32),
        Load(Access(1, (1,)), F32),
        Store(Access(0, (1,)), 1),
        Store(Access(1, (1,)), 0),
    )
    kernel = Kernel((), S0, (Arg(F32, True), Arg(F32, True)), body)
    x, y = _randn(5), _randn(5) + 3
    a, b = x.clone(), y.clone()
    interpret(kernel, [a, b], {"s0": 5})
    assert torch.equal(a, y)
    assert torch.equal(b, x)

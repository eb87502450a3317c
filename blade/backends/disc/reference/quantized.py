# SPDX-License-Identifier: Apache-2.0
"""The reference semantics of 8-bit products: exact sums in float64, then floats, optionally then bytes."""

from collections.abc import Sequence

import torch

from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.int8_epilogue import body_of, has_residual
from blade.backends.disc.ir.kernel import Compute, Const
from blade.backends.disc.ir.pointwise import POINTWISE_REFERENCE


def product(value: Value, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of an `int8_linear` or `int8_conv`."""
    x, w, scales, bias, *rows = operands
    residual = rows.pop() if has_residual(value) else None
    a = value.attrs
    zero = rows[1].double() if len(rows) > 1 else a["zero"]
    sums = _linear(x.double() - zero, w) if value.op == "int8_linear" else _conv(value, x, w)
    y = sums * scales.double() * a["scale"] * (rows[0] if rows else 1.0) + bias
    y = _followed(value, y.float(), residual)
    if value.dtype != torch.uint8:
        return y
    steps: torch.Tensor = torch.round(y * a["inverse"]) + a["point"]
    return steps.clamp(a["low"], a["high"]).to(value.dtype)


def scaled(value: Value, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of a `scaled_linear`, rounded once."""
    x, w, scales, bias, *rows = operands
    y = (x.double() @ w.double().t()) * scales.double() * value.attrs["scale"]
    y = y * (rows[0].double() if rows else 1.0) + bias.double()
    made: torch.Tensor = y.to(value.dtype)
    return made


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.double().t()


def _conv(value: Value, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, rank = value.attrs, len(value.shape)
    y: torch.Tensor = torch.ops.aten.convolution(
        (x.double() - a["zero"]).permute(to_channels_first(rank)),
        w.double(),
        None,
        a["stride"],
        a["padding"],
        a["dilation"],
        False,
        [0] * (rank - 2),
        a["groups"],
    )
    return y.permute(to_channels_last(rank))


def _followed(value: Value, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """``y`` after the statements of the product's epilogue."""
    known = [y]
    if residual is not None:
        scale, zero = value.attrs["residual"]
        known.append((residual.float() - zero) * scale)
    body = body_of(value)
    for stmt in body:
        if isinstance(stmt, Const):
            known.append(torch.full_like(y, stmt.value, dtype=stmt.dtype))
        else:
            assert isinstance(stmt, Compute), stmt
            known.append(POINTWISE_REFERENCE[stmt.op](*(known[k] for k in stmt.args)))
    return known[-1] if body else y

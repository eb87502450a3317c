# SPDX-License-Identifier: Apache-2.0
"""Keys and values repeated for grouped heads, as transformers writes it: nothing is repeated in memory."""

import pytest
import torch
import torch.nn.functional as F
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    wide = x[:, :, None].expand(batch, heads, times, length, width)
    return wide.reshape(batch, heads * times, length, width)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3), bias)


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Another order of the heads: h, h', h, h' ... is no grouping."""
    k, v = (x.repeat(1, 3, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, bias)


def given(batch: int, length: int, past: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(length)
    shapes = [(batch, 6, length, 8), *[(batch, 2, past, 8)] * 2, (batch, 1, length, past)]
    return [torch.randn(shape, generator=rng) for shape in shapes]


@pytest.mark.parametrize(("function", "copies"), [(grouped, 1), (tiled, 3)])
def test_grouped_heads(function: object, copies: int) -> None:
    """One copy is the output, in the order of its axes."""
    samples = given(2, 3, 5)
    dynamic = [[True, False, True, False]] * 3 + [[True, False, True, True]]
    gm, shape_env = trace(function, samples, dynamic)  # type: ignore[arg-type]
    made = compile_ir(lower(gm, shape_env), host())
    kernels = [line for line in made.program.splitlines() if line.startswith("kernel ")]
    assert sum("attention" not in line.split()[1] for line in kernels) == copies
    engine = make_engine("test", "disc", made.program, made.object, list(made.constants), {})
    for size in [(2, 3, 5), (1, 1, 1), (3, 17, 33)]:
        inputs = given(*size)
        found = engine.try_execute(inputs)
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], function(*inputs), rtol=2e-5, atol=2e-6)  # type: ignore[operator]


def test_heads_repeated_for_another_batch_stay_repeated() -> None:
    """Keys and values of one batch entry for all queries, as torch broadcasts them."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3))

    def one_for_all(*size: int) -> list[torch.Tensor]:
        q, k, v, _ = given(*size)
        return [q, k[:1], v[:1]]

    dynamic = [[True, False, True, False]] + [[False, False, True, False]] * 2
    gm, shape_env = trace(function, one_for_all(2, 3, 5), dynamic)
    made = compile_ir(lower(gm, shape_env), host())
    engine = make_engine("test", "disc", made.program, made.object, list(made.constants), {})
    for size in [(2, 3, 5), (1, 1, 1), (3, 17, 33)]:
        inputs = one_for_all(*size)
        found = engine.try_execute(inputs)
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], function(*inputs), rtol=2e-5, atol=2e-6)

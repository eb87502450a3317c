# SPDX-License-Identifier: Apache-2.0
"""Many small equal launches are one: casts of parameters, of gradients, and an optimizer's updates in place."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from op_trace import trace
from run_program import GpuProgram, compile_to_program
from test_gpu_compile import accesses, ptx

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")

BF16 = torch.bfloat16
Tensors = Sequence[torch.Tensor]


def compiled(
    function: Callable[..., object], inputs: Tensors, updates: Sequence[int] = ()
) -> GpuProgram:
    gm, shape_env = trace(function, inputs, [[False] * t.dim() for t in inputs])
    return compile_to_program(lower(gm, shape_env, updates=updates, forms=FORMS))


def launches(program: GpuProgram, *inputs: torch.Tensor) -> list[str]:
    return program.ran(*inputs)


def weights(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 7, 33])
def test_casts_of_parameters(count: int) -> None:
    given = weights(count, 40, 30)

    def function(*w: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(BF16) for x in w]

    program = compiled(function, given)
    for got, x in zip(program(*given), given, strict=True):
        assert torch.equal(got, x.to(BF16))
    assert len(launches(program, *given)) == bin(count % 32).count("1") + count // 32


def test_before_what_reads_them_and_after_what_makes_them() -> None:
    """Chains of products: the casts of all weights before the first, of all results after the last."""
    given = [torch.randn(16, 32, dtype=BF16), *weights(4, 32, 32)]

    def function(x: torch.Tensor, *w: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for one in w:
            x = torch.relu(x @ one.to(BF16))
            made.append((x * 2).to(torch.float32))
        return made

    program = compiled(function, given)
    for got, want in zip(program(*given), function(*given), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    ran = launches(program, *given)
    assert ran[0] == "loop4" and ran.count("loop4") == 1, ran


def test_results_that_nobody_reads() -> None:
    given = [torch.randn(16, 32, dtype=BF16) for _ in range(8)]

    def function(*x: torch.Tensor) -> list[torch.Tensor]:
        products = [a @ b.t() for a, b in zip(x[::2], x[1::2], strict=True)]
        return [p.to(torch.float32) for p in products]

    program = compiled(function, given)
    for got, want in zip(program(*given), function(*given), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_step_of_an_optimizer_in_place() -> None:
    """Momentum: two new contents from each parameter, gradient and buffer."""
    given = [*weights(3, 50), *weights(3, 50), *weights(3, 50), *weights(1, 7), *weights(2, 7)]

    def step(
        p: torch.Tensor, g: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = m * 0.9 + g
        return p - 0.1 * new, new

    def function(*t: torch.Tensor) -> list[torch.Tensor]:
        pairs = [step(*one) for one in (*zip(t[:3], t[3:6], t[6:9], strict=True), t[9:])]
        return [new for pair in pairs for new in pair]

    updates = [0, 6, 1, 7, 2, 8, 9, 11]
    program = compiled(function, given, updates)
    instructions = program.text.split("instructions ")[1].splitlines()
    assert not any("aten::copy_" in line for line in instructions), program.text
    want = function(*given)
    copies = [t.clone() for t in given]
    program(*copies)
    for i, new in zip(updates, want, strict=True):
        torch.testing.assert_close(copies[i], new)
    ran = launches(program, *given)
    assert ran == ["loop2", "loop", "loop"], ran  # three of 50 elements, one of 7


def test_what_another_kernel_reads_is_made_where_it_was() -> None:
    given = weights(3, 64)

    def function(*x: torch.Tensor) -> list[torch.Tensor]:
        halves = [one.to(BF16) for one in x]
        return [*halves, sum(h.to(torch.float32).sum() for h in halves)]

    program = compiled(function, given)
    got, want = program(*given), function(*given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_of_sizes_that_vary_nothing_is_joined() -> None:
    given = weights(4, 40)
    gm, shape_env = trace(lambda *w: [x.to(BF16) for x in w], given, [[True]] * 4)
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert launches(program, *weights(4, 9)) == ["loop"] * 4


@pytest.mark.needs("triton")
def test_batches_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    given = weights(8, 64, 64)
    program = compiled(lambda *w: [x.to(BF16) for x in w], given)
    (unit,) = (u for u in program.units.values() if u.name.startswith("loop8"))
    text = ptx(unit, tmp_path)
    assert accesses(text, "ld") == {16}
    assert min(accesses(text, "st")) >= 8

# SPDX-License-Identifier: Apache-2.0
"""A convolution writes over the residual it adds where nothing else needs it."""

import pytest
import torch
from disc_programs import S0, S1, S2, add_input, finish, new_builder

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.cpu.conv import implicit_gemm as conv
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    contiguous_strides,
)
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = pytest.mark.needs("torch_mlir", "runtime")
CHANNELS = 32


class Net:
    """Convolutions of ``CHANNELS`` to as many, image sizes kept."""

    def __init__(self) -> None:
        self.b: IrBuilder = new_builder()
        self.x = add_input(self.b, (S0, S1, S2, CHANNELS))
        self.weights: list[torch.Tensor] = []

    def conv(self, x: Value, kernel: int, residual: Value | None = None) -> Value:
        out, depth = CHANNELS, x.shape[-1]
        weight = torch.randn(out, depth, kernel, kernel) / (kernel * depth**0.5)
        strides = contiguous_strides(weight.shape)
        index = len(self.weights)
        w = self.b.make("const", (), weight.shape, weight.dtype, strides, index=index)
        self.weights.append(weight)
        return self.b.make(
            "conv",
            [x, w, *([] if residual is None else [residual])],
            (*x.shape[:-1], out),
            torch.float32,
            stride=(1, 1),
            padding=(kernel // 2,) * 2,
            dilation=(1, 1),
            groups=1,
            activation=None,
            transposed=False,
        )

    def ending_in(self, value: Value) -> Graph:
        """``value`` inside the program, not its result."""
        return finish(self.b, self.conv(value, 1), constants=self.weights)


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.conv2d(x.double().permute(0, 3, 1, 2), weight.double(), padding=weight.shape[-1] // 2)
    return y.permute(0, 2, 3, 1)


def reused(program: str) -> int:
    return sum(" reuse " in line for line in program.splitlines())


@pytest.mark.parametrize(("kernel", "taken"), [(1, 1), (3, 1)], ids=["one pass", "Winograd"])
def test_a_residual_that_ends_there_gives_its_bytes(kernel: int, taken: int) -> None:
    torch.manual_seed(kernel)
    net = Net()
    inner, residual = net.conv(net.x, 1), net.conv(net.x, 1)
    graph = net.ending_in(net.conv(inner, kernel, residual))
    compiled = compile_ir(graph, host())
    assert reused(compiled.program) == taken
    engine = make_engine("t", "disc", compiled.program, compiled.object, compiled.constants)
    a, r, w, last = net.weights
    for sizes in [(1, 1, 1), (2, 5, 9), (1, 30, 31), (0, 3, 3)]:
        x = torch.randn(*sizes, CHANNELS)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        want = plain(plain(plain(x, a), w) + plain(x, r), last)
        torch.testing.assert_close(found[0].double(), want, rtol=1e-4, atol=1e-4)


def test_sums_of_several_passes_wait_in_a_buffer_of_their_own() -> None:
    net = Net()
    parts = [net.conv(net.x, 1) for _ in range(9)]
    shape = (*net.x.shape[:-1], len(parts) * CHANNELS)
    many = net.b.make("concat", parts, shape, torch.float32, axis=3)
    residual = net.conv(net.x, 1)
    assert shape[-1] > conv.BLOCK_DEPTH
    graph = net.ending_in(net.conv(many, 1, residual))
    assert reused(compile_ir(graph, host()).program) == 0


def test_what_is_also_convolved_or_read_later_is_kept() -> None:
    for later in (False, True):
        net = Net()
        inner = net.conv(net.x, 1)
        residual = net.conv(net.x, 1) if later else inner
        value = net.conv(inner, 3, residual)
        if later:
            value = net.conv(value, 1, residual)
            value = net.conv(value, 3, net.conv(residual, 1))
        program = compile_ir(net.ending_in(value), host()).program
        first = next(s for s in program.splitlines() if " reuse " in s) if later else None
        assert reused(program) == (1 if later else 0), first

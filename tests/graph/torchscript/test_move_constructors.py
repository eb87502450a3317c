# SPDX-License-Identifier: Apache-2.0
"""Tables of indices that a model makes on the CPU move to its device; ``meta`` stands for an accelerator here."""

from collections.abc import Callable

import pytest
import torch

from blade.capture.clean import clean, freeze
from blade.graph.torchscript.functionalize import functionalize
from blade.graph.torchscript.move_constructors import move_constructors

META = torch.device("meta")


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., object], device: torch.device = META) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(1000, 4, device=device))
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x, self.table)


def devices_of(function: Callable[..., object], device: torch.device = META) -> list[str]:
    """The devices, in order, on which constructors make their results after the pass."""
    x = torch.ones(4, 5, device=device)
    traced = torch.jit.trace(Model(function, device).eval(), (x,), check_trace=False)
    module = freeze(traced, (), True)
    clean(module, ())
    functionalize(module, [(x,)])
    before = [out.shape for out in tensors(module(x))]
    move_constructors(module, [(x,)])
    torch._C._jit_pass_lint(module.graph)
    assert [out.shape for out in tensors(module(x))] == before
    return [
        str(node.inputsAt(place).toIValue())
        for node in module.graph.nodes()
        for place in [{"aten::arange": 3, "aten::zeros": 3}.get(node.kind(), 0)]
        if place
    ]


def tensors(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def relative_positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As BEiT makes them: a grid, writes to slices, numbers of sizes."""
    n, m = x.shape
    coordinates = torch.stack(torch.meshgrid(torch.arange(n), torch.arange(m), indexing="ij"))
    flat = torch.flatten(coordinates, 1)
    relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += n - 1
    relative[:, :, 0] *= 2 * m - 1
    index = torch.zeros(size=(n * m + 1,) * 2, dtype=relative.dtype)
    index[1:, 1:] = relative.sum(-1)
    index[0, 0:] = 2 * n * m - 1
    return table[index.view(-1)]


def test_a_table_of_relative_positions() -> None:
    assert devices_of(relative_positions) == ["meta"] * 3


def test_a_mask_that_is_copied() -> None:
    def function(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[1], device="cpu") > 1).to(x.device)

    assert devices_of(function) == ["meta"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, table: torch.arange(x.shape[0], device="cpu"),
        lambda x, table: (table[torch.arange(3)], torch.arange(3, device="cpu") + x.shape[0]),
        lambda x, table: x * torch.linspace(0, 1, x.shape[1]).to(x.device),
        lambda x, table: table[: int(torch.arange(x.shape[0], device="cpu").sum())],
    ],
    ids=["returned", "another returned", "floats", "read"],
)
def test_what_stays(function: Callable[..., object]) -> None:
    assert "meta" not in devices_of(function)[-1:]


def test_a_tensor_of_the_cpu_beside_it() -> None:
    """What is added to a tensor that stays, stays."""

    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(4, device="cpu")
        return table[torch.arange(x.shape[0], device="cpu") + kept.float().long()]

    assert set(devices_of(function)) != {"meta"}


def test_a_model_on_the_cpu_is_left_alone() -> None:
    assert devices_of(relative_positions, torch.device("cpu")) == ["cpu"] * 3

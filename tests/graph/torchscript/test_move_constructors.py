# SPDX-License-Identifier: Apache-2.0
"""Tables of indices that a model makes on the CPU move to its device; ``meta`` stands for an accelerator here."""

from collections.abc import Callable

import pytest
import torch

from blade.capture.clean import clean, freeze
from blade.graph.torchscript.functionalize import functionalize
from blade.graph.torchscript.move_constructors import (
    _are_alike,
    _read_elsewhere,
    _values,
    move_constructors,
)
from blade.graph.torchscript.observe_values import observe_tensors
from blade.graph.torchscript.program import read

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


def buckets(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As MPNet and WavLM make them, and a scale as DeBERTa makes it."""
    n = x.shape[1]
    distance = torch.abs(torch.arange(n, device="cpu")[:, None] - torch.arange(n, device="cpu"))
    far = (torch.log(distance.float() / 8) / 2.7725887 * 8).to(torch.long)
    bucket = torch.where(distance < 8, distance, torch.min(far, torch.full_like(far, 15)))
    scale = torch.sqrt(torch.scalar_tensor(n, dtype=torch.float, device="cpu") * 3)
    return table[bucket.to(x.device)] / scale.to(dtype=x.dtype)


@pytest.mark.parametrize("is_alike", [True, False])
def test_floats_move_where_the_device_gives_the_same(
    is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``meta`` computes nothing, so that the comparison is what the test says."""
    runs = iter([[[torch.tensor([1, 2])]], [[torch.tensor([1, 2 if is_alike else 3])]]])
    read: list[int] = []

    def values(program: object, module: object, samples: object, read_there: object) -> object:
        read.append(len(read_there))  # type: ignore[arg-type]
        return next(runs)

    monkeypatch.setattr("blade.graph.torchscript.move_constructors._values", values)
    assert devices_of(buckets) == ["meta" if is_alike else "cpu"]
    assert read == [2, 2]


def test_what_floats_are_read_as() -> None:
    """The values that the comparison sees, by a program whose device is the CPU."""
    x, table = torch.ones(4, 20), torch.ones(1000, 4)
    module = freeze(torch.jit.trace(Model(buckets, table.device).eval(), (x,)), (), True)
    clean(module, ())
    functionalize(module, [(x,)])
    program = read(module.graph)
    moved = [line for line in program.lines if line.kind in ("aten::arange", "aten::log")]
    [seen] = _values(program, module, [(x,)], _read_elsewhere(program, moved))
    assert [(one.dtype, one.shape) for one in seen] == [
        (torch.int64, (20,)),
        (torch.float32, (20, 20)),
    ]


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        (torch.tensor([3]), torch.tensor([4]), False),
        (torch.tensor([3]), torch.tensor([3]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2e-7]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2e-6]), False),
        (torch.tensor([-torch.inf]), torch.tensor([-torch.inf]), True),
        (torch.ones(1), torch.ones(2), False),
    ],
)
def test_alike(one: torch.Tensor, other: torch.Tensor, is_alike: bool) -> None:
    assert _are_alike([[one]], [[other]]) is is_alike


def test_a_tensor_of_the_cpu_beside_it() -> None:
    """What is added to a tensor that stays, stays."""

    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(4, device="cpu")
        return table[torch.arange(x.shape[0], device="cpu") + kept.float().long()]

    assert set(devices_of(function)) != {"meta"}


def test_a_model_on_the_cpu_is_left_alone() -> None:
    assert devices_of(relative_positions, torch.device("cpu")) == ["cpu"] * 3


def test_nothing_to_observe_is_no_error() -> None:
    """Constructors whose values only other moved ones read."""
    module = torch.jit.freeze(torch.jit.script(torch.nn.ReLU().eval()))
    assert observe_tensors(read(module.graph), module, [torch.ones(2)], {}) == {}

# SPDX-License-Identifier: Apache-2.0
"""The guards of an exported program are its conditions on sizes, without those that others imply."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exported_models import Computes, interface
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from blade.capture.exported.export_script import export
from blade.capture.exported.guards import find_guards, text_of
from blade.capture.exported.to_script import leaves, to_script
from blade.errors import Refused


def exported(function: Callable[..., Any], *shapes: Sequence[int]) -> ExportedProgram:
    """Every size is dynamic."""
    return export(Computes(function), interface(*(torch.randn(*shape) for shape in shapes)))


def declared(function: Callable[..., Any], shapes: Any, *inputs: torch.Tensor) -> ExportedProgram:
    return torch.export.export(Computes(function), inputs, dynamic_shapes={"inputs": shapes})


def texts(program: ExportedProgram, all_ranges: bool = True) -> list[str]:
    found = find_guards(program, leaves(program), all_ranges)
    return [text_of(one).replace("inputs_", "x") for one in found.conditions]


def _multiple_of_seven(x: torch.Tensor) -> torch.Tensor:
    batch, length = x.shape
    if length % 7 == 0:
        return x.view(batch, length // 7, 7).sum(1)
    return x


def _padded_to_seven(x: torch.Tensor) -> torch.Tensor:
    batch, length = x.shape
    if length % 7 != 0:
        x = F.pad(x, (0, 7 - length % 7))
    return x.reshape(batch, -1, 7).sum(1)


def _short(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] <= 20 else x


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Halves the length, pads it to blocks of four, and has no rest of blocks of eight."""
    batch, length = x.shape
    x = x.view(batch, length // 2, 2).sum(-1)
    rest = (4 - x.shape[1] % 4) % 4
    if rest > 0:
        x = F.pad(x, (0, rest))
    return x.view(batch, x.shape[1] // 8, 8).sum(-1)


def _at_most(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(32)[: x.shape[1]] + x


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[0] == 1 else x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (torch.relu, [(2, 3)], []),
        (torch.matmul, [(4, 3), (3, 5)], ["x1.size(0) == x0.size(1)"]),
        (_short, [(2, 6)], ["x0.size(1) <= 20"]),
        (_multiple_of_seven, [(2, 14)], ["x0.size(1) % 7 == 0"]),
        (_padded_to_seven, [(2, 13)], ["x0.size(1) >= 1", "x0.size(1) % 7 >= 1"]),
        (_padded_to_seven, [(2, 21)], ["x0.size(1) % 7 == 0"]),
        (_in_blocks, [(2, 32)], ["x0.size(1) % 16 == 0"]),
        (_at_most, [(2, 6)], ["x0.size(1) <= 32"]),
        (_alone, [(2, 6)], ["x0.size(0) != 1"]),
        (_alone, [(1, 6)], ["x0.size(0) == 1"]),
    ],
)
def test_decisions_on_sizes(
    function: Callable[..., Any], shapes: Sequence[Sequence[int]], expected: list[str]
) -> None:
    assert [
        one for one in texts(exported(function, *shapes)) if "x0.size(0) >=" not in one
    ] == expected


def test_declared_sizes() -> None:
    size = Dim("size", min=3, max=64)
    program = declared(
        lambda x, y, z: x.sum() + y[1:].sum() + z.sum() + (x + y[1:]).sum(),
        ({0: size}, {0: size + 1}, {0: 2 * size}),
        *(torch.randn(n, 3) for n in (4, 5, 8)),
    )
    expected = ["x0.size(0) >= 3", "x0.size(0) <= 64", "x0.size(1) == 3"]
    expected += ["x1.size(1) == 3", "x2.size(1) == 3"]
    expected += ["x1.size(0) == 1 + x0.size(0)", "x2.size(0) == 2 * x0.size(0)"]
    assert texts(program) == expected


def test_a_size_that_is_an_expression_alone() -> None:
    program = declared(torch.relu, ({0: 2 * Dim("half", min=3, max=8)},), torch.randn(8))
    assert texts(program) == [
        "x0.size(0) % 2 == 0",
        "x0.size(0) >= 6",
        "x0.size(0) // 2 <= 8",
    ]
    module = to_script(program, interface(torch.randn(8)))
    for size in (6, 10, 16):
        module(torch.randn(size))
    for size in (4, 7, 18):
        with pytest.raises(torch.jit.Error, match=r"inputs_0.size\(0\).* does not hold"):
            module(torch.randn(size))


def test_the_end_that_export_takes_for_granted() -> None:
    program = declared(torch.relu, ({0: Dim.AUTO},), torch.randn(4))
    assert texts(program, all_ranges=True) == ["x0.size(0) >= 2"]
    assert texts(program, all_ranges=False) == []


def test_a_guard_that_is_unknown() -> None:
    program = declared(torch.relu, ({0: Dim.AUTO},), torch.randn(4))
    program._guards_code.append("math.sinh(L['inputs'][0].size()[0]) > 3")
    with pytest.raises(Refused, match=r"cannot be checked: math.sinh"):
        find_guards(program, leaves(program), all_ranges=True)


def test_dtypes_and_ranks_are_guards() -> None:
    x = torch.randn(4, 3)
    module = to_script(exported(torch.relu, (4, 3)), interface(x))
    with pytest.raises(torch.jit.Error, match=r"inputs_0.dtype == torch.float32 does not hold"):
        module(x.double())
    with pytest.raises(torch.jit.Error, match=r"inputs_0.dim\(\) == 2 does not hold"):
        module(x[0])

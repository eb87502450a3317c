# SPDX-License-Identifier: Apache-2.0
"""What constants and static sizes determine is computed once, when a graph is compiled."""

from collections.abc import Callable

import pytest
import torch
from op_trace import trace
from torch.nn import functional

import blade
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.frontend.static_parts import static_parts
from blade.backends.disc.reference.interpret_graph import interpret

torch.manual_seed(0)
GRID, TABLE, WEIGHT = torch.randn(1, 4, 3, 3), torch.randn(25, 2), torch.randn(4, 2)
INDEX = torch.randint(0, 25, (48,))
X = torch.randn(2, 4, 6, 8)


def resampled(x: torch.Tensor) -> torch.Tensor:
    return x + functional.interpolate(GRID, x.shape[2:], mode="bicubic").relu()


def looked_up(x: torch.Tensor) -> torch.Tensor:
    """Positions through a small network, as in Swin V2."""
    table = functional.linear(TABLE, WEIGHT).relu()[INDEX]
    return x * table.view(6, 8, 4).permute(2, 0, 1).sigmoid()


def random(x: torch.Tensor) -> torch.Tensor:
    return x + functional.dropout(TABLE, 0.5)[INDEX].sum()


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE[(x.flatten()[:48] > 0).long()].sum()


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE.to(torch.int8)[INDEX].float().sum()


Function = Callable[[torch.Tensor], torch.Tensor]


def names(function: Function, *dynamic: bool) -> list[str]:
    gm, _ = trace(function, [X], [dynamic or (True, False, False, False)])
    return [str(node.target) for node in static_parts(gm)]


@pytest.mark.parametrize("function", [resampled, looked_up])
def test_a_constant_takes_their_place(function: Function) -> None:
    gm, shape_env = trace(function, [X], [(True, False, False, False)])
    kept, folded = (lower(gm, shape_env, folds=folds) for folds in (False, True))
    assert {"gather"} <= {v.op for v in kept.values}
    assert len(folded.values) <= 5  # input, constant, as it lies, spread; the sum or product
    torch.testing.assert_close(interpret(folded, [X])[0], function(X))
    assert len(folded.constants) == 1


def test_what_is_behind_them_is_folded_with_them() -> None:
    assert names(resampled) == ["aten.relu.default"]
    assert names(looked_up) == ["aten.sigmoid.default"]


@pytest.mark.parametrize("function", [random, of_an_input])
def test_what_an_input_or_chance_determines_is_not(function: Function) -> None:
    assert names(function) == []


def test_sizes_that_vary_determine_nothing() -> None:
    assert names(resampled, True, False, True, True) == []
    assert names(looked_up, True, False, True, True) == ["aten.sigmoid.default"]


class Looks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(TABLE.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return looked_up(x) + self.table[INDEX].sum()


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_compiled_model_follows_its_parameters() -> None:
    model = Looks().eval()
    run = torch.compile(model, backend=blade.dynamo.disc)
    with torch.no_grad():
        torch.testing.assert_close(run(X), model(X))
        model.table.mul_(3)
        torch.testing.assert_close(run(X), model(X))

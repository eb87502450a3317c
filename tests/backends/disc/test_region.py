# SPDX-License-Identifier: Apache-2.0
"""Parts that are put into another tensor are as large as their place, or the engine declines: no write past an end."""

from collections.abc import Callable

import pytest
import torch
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
aten = torch.ops.aten


def _compiled(function: Callable[..., torch.Tensor], *samples: torch.Tensor) -> Engine:
    gm, shape_env = trace(function, samples, [[True] * s.dim() for s in samples])
    made = compile_ir(lower(gm, shape_env), host())
    return make_engine("test", "disc", made.program, made.object, list(made.constants), {})  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "taken", "refused"),
    (
        (
            lambda x, y: aten.slice_scatter(x, y, 1, 0, 10),
            [((4, 20), (4, 10)), ((3, 11), (3, 10)), ((3, 9), (3, 9)), ((2, 1), (2, 1))],
            [((3, 9), (3, 10)), ((2, 1), (2, 10)), ((3, 20), (2, 10)), ((3, 20), (3, 9))],
        ),
        (
            lambda x, y: aten.slice_scatter(x, y, 0, -3),
            [((7, 2), (3, 2)), ((2, 5), (2, 5))],
            [((2, 5), (3, 5)), ((7, 2), (7, 2))],
        ),
        (
            lambda x, y: aten.select_scatter(x, y, 1, 2),
            [((4, 5, 3), (4, 3)), ((2, 3, 7), (2, 7))],
            [((4, 5, 3), (3, 4)), ((2, 2, 7), (2, 7)), ((2, 3, 2), (2, 7))],
        ),
    ),
    ids=("slice", "slice from the end", "select"),
)
def test_a_part_of_another_size_is_declined(
    function: Callable[..., torch.Tensor],
    taken: list[tuple[tuple[int, ...], ...]],
    refused: list[tuple[tuple[int, ...], ...]],
) -> None:
    engine = _compiled(function, *map(torch.randn, taken[0]))
    for shapes in taken:
        inputs = [torch.randn(s) for s in shapes]
        outputs = engine.try_execute(inputs)
        assert outputs is not None
        torch.testing.assert_close(outputs[0], function(*inputs))
    for shapes in refused:
        inputs = [torch.randn(s) for s in shapes]
        with pytest.raises((RuntimeError, IndexError)):
            function(*inputs)
        assert engine.try_execute(inputs) is None

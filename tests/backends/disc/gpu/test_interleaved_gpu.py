# SPDX-License-Identifier: Apache-2.0
"""Rows of interleaved parts on a GPU: what is computed with them is computed on the parts, and stored once."""

import pytest
import torch
from op_trace import trace
from run_program import compile_to_program
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")

ROWS = (True, False)


def rotate_every_two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Rotary(nn.Module):
    """Of GPT-J: the first elements of every head are rotated in pairs, the others stay."""

    def __init__(self, rotated: int) -> None:
        super().__init__()
        self.rotated = rotated

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, rest = x[..., : self.rotated], x[..., self.rotated :]
        turned = first * cos[:, None] + rotate_every_two(first) * sin[:, None]
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rotated", [8, 12, 16])
def test_rotary_embeddings_of_pairs(rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Rotary(rotated)
    close = (
        {} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    )  # rounded at other places

    def inputs(batch: int, length: int) -> list[torch.Tensor]:
        angles = torch.randn(batch, length, rotated)
        x = torch.randn(batch, 2, length, 16, dtype=dtype)
        return [x, angles.cos().to(dtype), angles.sin().to(dtype)]

    axes = [(True, False, True, False), (True, True, False), (True, True, False)]
    program = compiled(model, inputs(2, 5), axes)
    for batch, length in ((2, 5), (1, 1), (3, 7)):
        given = inputs(batch, length)
        torch.testing.assert_close(program(*given), [model(*given)], **close)
        assert program.ran(*given) == ["loop"] * (1 + (rotated < 16))


def test_pairs_are_read_and_written_together() -> None:
    """Two bytes of every four, in two accesses, take several times as long."""
    x, angles = torch.randn(2, 2, 5, 16), torch.randn(2, 5, 16)
    axes = [(True, False, True, False), (True, True, False), (True, True, False)]
    program = compiled(Rotary(16), [x, angles.cos(), angles.sin()], axes)
    [text] = {u.text for u in program.units.values()}
    assert text.count("tl.load") == text.count("tl.split") == 3
    assert text.count("tl.store") == text.count("tl.join") == 1


def test_pairs_of_many_columns() -> None:
    """Tiled along columns, the last tile with a mask; and a value that all of a row's columns share."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * y, second - first), -1).flatten(-2) + x

    for pairs in (3, 700, 4096):
        x, y = torch.randn(3, 2 * pairs), torch.randn(3, 1)
        program = compile_to_program(lower(*trace(forward, [x, y], [ROWS, ROWS]), forms=FORMS))
        for rows in (3, 1, 33):
            x, y = torch.randn(rows, 2 * pairs), torch.randn(rows, 1)
            torch.testing.assert_close(program(x, y), [forward(x, y)])


def test_a_row_with_another_reader_stays() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = rotate_every_two(x)
        return row * 2, row.sum(-1)

    x = torch.randn(3, 8)
    program = compile_to_program(lower(*trace(forward, [x], [ROWS]), forms=FORMS))
    torch.testing.assert_close(program(x), list(forward(x)))


def test_three_parts() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack((x.exp(), x + 1, x * x), -1).flatten(-2) * y + y.sigmoid()

    x, y = torch.randn(3, 8), torch.randn(3, 24)
    program = compile_to_program(lower(*trace(forward, [x, y], [ROWS, ROWS]), forms=FORMS))
    for rows in (3, 1, 9):
        x, y = torch.randn(rows, 8), torch.randn(rows, 24)
        torch.testing.assert_close(program(x, y), [forward(x, y)])
    assert program.ran(x, y) == ["loop"]

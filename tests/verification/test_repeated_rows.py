# SPDX-License-Identifier: Apache-2.0
"""Rows repeated as often as a tensor says, into a result whose size is given: on a GPU an assertion."""

import pytest
import torch

from blade.verification.index_guard import IndexBoundsMode


@pytest.mark.parametrize("rows", [torch.ones(3, 4), torch.ones(4)])
def test_repeats_make_as_many_rows_as_they_say(rows: torch.Tensor) -> None:
    def repeat(n: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(rows, n, 0, output_size=5)

    fine = torch.tensor([2, 0, 3, *[0] * (len(rows) - 3)])
    with torch.no_grad(), IndexBoundsMode() as seen:
        assert len(repeat(fine)) == 5
        with pytest.raises(IndexError):
            repeat(fine + 1)
    assert "rows of 5" in seen.why

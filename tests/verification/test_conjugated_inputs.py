# SPDX-License-Identifier: Apache-2.0
"""Inputs that are conjugated or negated when they are read are given to an engine as they lie in memory."""

import pytest
import torch
from verified import cluster, remembering, run

from blade.report import Verdict


class Neg(torch.nn.Module):
    """Written in ATen, as extraction writes it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.aten.neg.default(x),)


@pytest.mark.parametrize("flag", ["is_conj", "is_neg"])
def test_what_is_conjugated_or_negated_is_given_as_it_lies(flag: str) -> None:
    whole = torch.randn(5, 6, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    conjugated = whole[:, :, :4].conj()
    part = conjugated if flag == "is_conj" else conjugated.imag
    seen: list[torch.Tensor] = []

    assert isinstance(run(cluster(Neg(), [part]), run=remembering(seen)), Verdict)
    assert getattr(part, flag)() and getattr(seen[0], flag)()
    assert seen[0].stride() == part.stride()
    torch.testing.assert_close(seen[0], part, rtol=0, atol=0)

# SPDX-License-Identifier: Apache-2.0
"""ConstantWatch: writes that no version counter tells of move the versions on, and nothing else does."""

import pytest
import torch

from blade.dynamo.constant_watch import ConstantWatch

LAYOUTS = {
    "dense": torch.randn(64, 48),
    "transposed": torch.randn(48, 64).mT,
    "columns": torch.randn(8, 64)[:, ::2],
    "expanded": torch.randn(64, 1).expand(64, 8),
    "scalar": torch.tensor(2.0),
    "half": torch.randn(100).half(),
    "integers": torch.arange(100),
    "with_nan": torch.tensor([1.0, torch.nan, 3.0]),
}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "expanded"])
def test_a_write_through_data_is_seen_once(name: str) -> None:
    constant, other = LAYOUTS[name].clone(memory_format=torch.preserve_format), torch.ones(5)
    if name == "columns":
        constant = torch.randn(8, 64)[:, ::2]
    other = other.to(torch.float64)
    watch = ConstantWatch([constant, other])
    watch.check()
    before = constant._version, other._version
    constant.data.add_(1)
    assert constant._version == before[0]
    watch.check()
    watch.check()
    assert (constant._version, other._version) == (before[0] + 1, before[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_written_nothing_changes(name: str) -> None:
    constant = LAYOUTS[name]
    watch = ConstantWatch([constant])
    before = constant._version
    watch.check()
    assert constant._version == before


def test_what_cannot_be_written_or_read_is_left_alone() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    watch = ConstantWatch([made, torch.empty(0), torch.empty(3, device="meta")])
    watch.check()
    assert not watch._seen

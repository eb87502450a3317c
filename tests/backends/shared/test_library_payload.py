# SPDX-License-Identifier: Apache-2.0
"""Payloads say which library made them; weights that are written in place are noticed."""

import pytest
import torch

from blade.backends.shared.library_payload import LibraryHeader, pack, unpack
from blade.backends.shared.weight_versions import WeightVersions
from blade.errors import BackendError


def as_payload(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


HERE = {"lib": "1.2"}


def test_head_and_files_come_back() -> None:
    head = LibraryHeader(
        weights=("w",), inputs=("x",), outputs=("y", "z"), orders=(None, (1, 0)), device="cuda"
    )
    again, model = unpack(as_payload(pack(head, HERE, b"data")), HERE, "Lib", 1)
    assert again == head
    assert model == b"data"


def test_another_version_is_no_engine_of_this_process() -> None:
    payload = as_payload(pack(LibraryHeader(), HERE, b"data"))
    with pytest.raises(BackendError, match=r"Lib compiled it for lib 1\.2, and this is lib 1\.3"):
        unpack(payload, {"lib": "1.3"}, "Lib", 0)


def test_damage_is_told() -> None:
    with pytest.raises(BackendError, match="what Lib compiled is damaged"):
        unpack(as_payload(pack(LibraryHeader(), HERE, b"data")[:-30]), HERE, "Lib", 0)


def test_a_weight_written_in_place_is_noticed() -> None:
    weights = [torch.randn(3), torch.randn(4)]
    with torch.inference_mode():
        weights.append(torch.randn(5))  # has no version
    watch = WeightVersions(weights)
    weights[0] + 1
    assert not watch.since()
    weights[1].mul_(2)
    assert watch.since()

# SPDX-License-Identifier: Apache-2.0
"""Payloads say which library made them; weights that are written in place are noticed."""

import pytest
import torch

from blade.errors import BackendError
from blade.exchange.payload import Head, pack, unpack
from blade.exchange.watch import Watch


def as_payload(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_head_and_data_come_back() -> None:
    head = Head("lib", "1.2", weights=("w",), inputs=("x",), outputs=("y",), orders=(None, (1, 0)))
    again, data = unpack(as_payload(pack(head, b"model")), "lib", "1.2")
    assert again == head
    assert data == b"model"


def test_another_version_is_no_engine_of_this_process() -> None:
    payload = as_payload(pack(Head("lib", "1.2"), b"model"))
    with pytest.raises(
        BackendError, match=r"with lib 1\.2, this process has lib 1\.3: .*lib==1\.2"
    ):
        unpack(payload, "lib", "1.3")


def test_a_weight_written_in_place_is_noticed() -> None:
    weights = [torch.randn(3), torch.randn(4)]
    with torch.inference_mode():
        weights.append(torch.randn(5))  # has no version
    watch = Watch(weights)
    weights[0] + 1
    assert not watch.since()
    weights[1].mul_(2)
    assert watch.since()

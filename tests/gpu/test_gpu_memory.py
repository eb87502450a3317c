# SPDX-License-Identifier: Apache-2.0
"""What trials on a GPU take, and give back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_backends import PythonEngine, writes_its_input
from verified import cluster

from blade.errors import EngineError
from blade.process.memory import empty_cache
from blade.report import Verdict
from blade.timing.cuda_graph import microseconds
from blade.verification.fingerprint import fingerprint, has
from blade.verification.verify import verify

pytestmark = pytest.mark.gpu
MIB = 1 << 20


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.aten.mean.dim(x, [-1]),)


@pytest.fixture
def large() -> Iterator[torch.Tensor]:
    empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield torch.randn(256, 256, 1024, device="cuda", dtype=torch.float16)  # 128 MiB


def _verified(x: torch.Tensor, **engine: Any) -> Any:
    of = cluster(Mean(), [x])
    return verify(of, PythonEngine(of.gm, **engine), of.gm, "fake", derived=False)  # type: ignore[arg-type]


def test_large_inputs_are_not_copied(large: torch.Tensor) -> None:
    seen: list[tuple[int, int]] = []

    def look(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        seen.append((inputs[0].data_ptr(), torch.cuda.memory_allocated()))
        return outputs

    before = torch.cuda.memory_allocated()
    assert isinstance(_verified(large, run=look), Verdict)
    assert seen
    assert all(at == large.data_ptr() and taken - before < 16 * MIB for at, taken in seen)


def test_a_fingerprint_takes_no_copy_of_a_large_tensor(large: torch.Tensor) -> None:
    several = torch.cat([large] * 4)
    for tensor in (several, several[:, 1:], several.mT):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert has(tensor, fingerprint(tensor))
        assert torch.cuda.max_memory_allocated() - before <= 160 * MIB


def test_a_write_to_the_users_memory_is_no_mere_reason(large: torch.Tensor) -> None:
    with pytest.raises(EngineError, match="wrote to its input 0 while it was verified at sample 0"):
        _verified(large, run=writes_its_input)


def test_what_was_allocated_to_measure_is_given_back() -> None:
    x = torch.randn(64 * MIB // 4, device="cuda")
    empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        assert microseconds(lambda i: x + i, 4) > 0
        assert torch.cuda.memory_reserved() > before
        empty_cache()
        assert torch.cuda.memory_reserved() == before

# SPDX-License-Identifier: Apache-2.0
"""free_unused: the cache is emptied where much of it is new, and not again for what stays."""

import pytest
import torch

from blade.process import memory

MIB = 1 << 20
GPU = torch.device("cuda", 0)


class Allocator:
    """``kept``: MiB that emptying leaves unused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unused = self.kept = self.emptied = 0
        patch.setattr(memory, "_kept", {})
        patch.setattr(memory, "_pools", [])
        patch.setattr(memory, "_unused", lambda device: self.unused * MIB)
        patch.setattr(torch.cuda, "empty_cache", self.empty)

    def empty(self) -> None:
        self.emptied, self.unused = self.emptied + 1, self.kept


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_little_is_kept(allocator: Allocator) -> None:
    allocator.unused = 255
    memory._free_unused(GPU)
    assert allocator.emptied == 0
    allocator.unused = 256
    memory._free_unused(GPU)
    assert (allocator.emptied, allocator.unused) == (1, 0)


def test_what_stays_is_not_new(allocator: Allocator) -> None:
    allocator.unused, allocator.kept = 900, 800
    memory._free_unused(GPU)
    memory._free_unused(GPU)
    assert allocator.emptied == 1
    allocator.unused = 1056
    memory._free_unused(GPU)
    assert allocator.emptied == 2


def test_what_was_used_again_counts_as_new(allocator: Allocator) -> None:
    allocator.unused, allocator.kept = 900, 800
    memory._free_unused(GPU)
    allocator.unused = 0
    memory._free_unused(GPU)
    allocator.unused = 300
    memory._free_unused(GPU)
    assert allocator.emptied == 2


def test_pools_are_released_first(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    memory.empties(lambda: seen.append(allocator.emptied))
    memory.empty_cache()
    assert (seen, allocator.emptied) == ([0], 1)


def test_a_cpu_has_no_cache(allocator: Allocator) -> None:
    allocator.unused = 1000
    memory.free_unused([torch.ones(2)])
    assert allocator.emptied == 0

# SPDX-License-Identifier: Apache-2.0
"""Buffers from 2 MiB on are asked for in huge pages, and given back."""

from pathlib import Path

import pytest
import torch
from programs import Writer

MIB = 1 << 20

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
pytestmark = pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the system has no huge pages")


def advised() -> int:
    """Bytes of this process's mappings that are to be huge pages."""
    total, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total


def double_relu() -> Writer:
    """relu(relu(x)), the first of them in the arena."""
    w = Writer()
    x = w.input("f32", 2)
    sizes = w.dims(x, 2)
    inside, out = w.tensor("arena", sizes), w.tensor("output", sizes)
    w.call("aten::relu.out", f"t:{w.slot(f'input {x}')}", f"t:{inside}")
    w.call("aten::relu.out", f"t:{inside}", f"t:{out}")
    w.outputs.append(out)
    return w


@pytest.mark.parametrize(("rows", "expected"), [(3, 3 * MIB), (1, 0)])
def test_arenas(rows: int, expected: int) -> None:
    try:
        before = advised()
    except OSError:
        pytest.skip("/proc/self/smaps cannot be read")
    engine = double_relu().engine()
    x = torch.randn(rows, MIB // 4)
    for _ in range(2):
        [y] = engine.try_execute([x])
        assert torch.equal(y, x.relu())
    assert advised() - before == expected
    del engine
    assert advised() == before

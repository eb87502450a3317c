# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA device: full precision in the libraries, a clean context, and what DISC took, summed up."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TAKEN = "disc_on_cuda"  # the property that a test records: "taken", or why not


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Convolutions in TF32 are torch's default; an answer may be off by twice what eager is off."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After an illegal access every later call of the process fails: this test ends its process, and only that.

    pytest-xdist starts another one; without it the session ends here, which is better than blaming the rest.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit(f"the CUDA context is broken after {item.nodeid}: {error}", returncode=70)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many samples DISC took on CUDA, and which it left to the original."""
    reports = [r for found in terminalreporter.stats.values() for r in found]
    said = [
        (value, report.nodeid)
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == TAKEN
    ]
    if not said:
        return
    left = Counter(value for value, _ in said if value != "taken")
    terminalreporter.section("DISC on CUDA")
    taken = sum(value == "taken" for value, _ in said)
    terminalreporter.write_line(f"taken: {taken} of {len(said)} samples and models")
    for why, count in left.most_common():
        names = ", ".join(nodeid.rpartition("::")[2] for value, nodeid in said if value == why)
        terminalreporter.write_line(f"left {count}: {why}: {names}")

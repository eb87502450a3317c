# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA device: full precision in the libraries, a clean context, and what DISC took, summed up."""

import faulthandler
import os
import signal
import sys
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
            print(
                f"\n{item.nodeid} broke the CUDA context: {error}", file=sys.__stderr__, flush=True
            )
            os._exit(70)
        pytest.exit(f"the CUDA context is broken after {item.nodeid}: {error}", returncode=70)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config), "gpu-failures")


def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker that does not end says where it hangs, and is ended: the others' results wait for it."""
    if hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(8, file=sys.__stderr__)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)


class _Failures:
    """Printed as they happen: time on a GPU is short, and a run may be ended before it sums up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None and "/gpu/" in report.nodeid:
            terminal.write_line("")
            for line in report.longreprtext.strip().splitlines()[-25:]:
                terminal.write_line(f"  {line}")
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})")


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

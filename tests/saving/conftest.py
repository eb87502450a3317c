# SPDX-License-Identifier: Apache-2.0
"""Saved files are opened in other processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def elsewhere() -> Callable[..., str]:
    """Run Python code in a fresh process, with further environment; what it printed."""

    def run(code: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **env},
            timeout=300,
            cwd=Path(__file__).parent,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run

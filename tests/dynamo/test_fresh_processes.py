# SPDX-License-Identifier: Apache-2.0
"""torch.compile in processes of their own: by name, with and without ``import blade``, and by function."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMPILES = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()
x = torch.randn(3, 8)
for backend in BACKENDS:
    torch._dynamo.reset()
    options = {"timing": False, "min_cluster_size": 1, "strict": True}
    compiled = torch.compile(model, backend=backend, options=options)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
import blade
assert blade.__file__.startswith(ROOT), blade.__file__
reports = blade.dynamo.reports()
assert len(reports) >= len(BACKENDS), reports
assert {c.backend for report in reports for c in report.clusters} == {"disc"}, reports
"""
NAMES = 'BACKENDS = ["disc", "aot_disc"]'
FUNCTIONS = "import blade; BACKENDS = [blade.dynamo.disc, blade.dynamo.aot_disc]"
NOT_INSTALLED = """
import importlib.metadata as metadata
found = metadata.entry_points
metadata.entry_points = lambda **params: (
    metadata.EntryPoints() if params == {"group": "torch_dynamo_backends"} else found(**params)
)
"""
REFUSED = """
import torch, blade
try:
    torch.compile(torch.nn.Linear(8, 8), backend="disc")(torch.randn(3, 8))
except Exception as error:
    assert "Invalid backend: 'disc'" in str(error), error
else:
    raise AssertionError("torch knows a backend that nothing told it of")
"""
needs_entry_points = pytest.mark.skipif(
    not any(p.name == "disc" for p in entry_points(group="torch_dynamo_backends")),
    reason="blade is imported from a folder and not installed: torch does not know its names",
)
pytestmark = pytest.mark.needs("runtime", "torch_mlir")


def run(*parts: str) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join([f"ROOT = {str(ROOT)!r}", *parts])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@needs_entry_points
def test_by_name_without_importing_blade() -> None:
    run(NAMES, COMPILES)


@needs_entry_points
def test_by_name_after_importing_blade() -> None:
    run("import blade", NAMES, COMPILES)


def test_by_function_where_blade_is_not_installed() -> None:
    run(NOT_INSTALLED, REFUSED, FUNCTIONS, COMPILES)

# SPDX-License-Identifier: Apache-2.0
"""``pytest tests/backends/disc --update-golden`` rewrites the golden texts of this folder."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts are written instead of compared."""
    # The option exists only where this folder was named on the command line.
    return bool(request.config.getoption("--update-golden", default=False))

# SPDX-License-Identifier: Apache-2.0
"""Every test here needs the built runtime."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "runtime" in item.path.parts:
            item.add_marker(pytest.mark.needs("runtime"))

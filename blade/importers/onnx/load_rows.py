# SPDX-License-Identifier: Apache-2.0
"""Imports every file of the table."""

import importlib
import pkgutil

from blade.importers.onnx import ops


def load_rows() -> None:
    """Fill the table; a second call does nothing."""
    for one in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{one.name}")
    importlib.import_module("blade.importers.onnx.control_flow")

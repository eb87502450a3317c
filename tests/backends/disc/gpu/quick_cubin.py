# SPDX-License-Identifier: Apache-2.0
"""``cubin.serve_compilations`` without what takes long: it compiles by a look at the text. Loaded without blade, as
cubin is."""

import importlib.util
import os
from pathlib import Path
from typing import Any


def serve(requests: Any, first: Any) -> None:
    cubin = _cubin()
    cubin._prepare = cubin._keep_in = lambda given: None
    cubin.compile_unit = _compile_unit
    cubin.pack = lambda unit: (unit.text.encode(), 128, os.getpid())
    cubin.serve_compilations(requests, first)


def fails(requests: Any, first: Any) -> None:
    raise ImportError("no such library")


def _cubin() -> Any:
    package = importlib.util.find_spec("blade")  # not imported by that
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "backends/disc/gpu/compile/cubin.py"
    spec = importlib.util.spec_from_file_location("cubin", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile_unit(unit: Any, target: Any, folder: str, shared: int) -> Any:
    os.write(1, b"on stdout\n")
    if unit.text == "crash":
        os.abort()
    assert unit.text != "wrong", "what is wrong"
    return unit

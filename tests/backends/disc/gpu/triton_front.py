# SPDX-License-Identifier: Apache-2.0
"""Units through Triton's front end, which refuses what its interpreter takes; a program of its own.

errors = refused(units)         # {} if all is well
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any


def refused(units: Iterable[Any]) -> dict[str, str]:
    """Name -> what Triton says, for the units it refuses."""
    from blade.backends.disc.gpu.compile import cubin

    request = pickle.dumps((cubin.__file__, [asdict(unit) for unit in units]))
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=request, stdout=subprocess.PIPE, env=environment, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    import importlib.util
    from types import SimpleNamespace

    path, units = pickle.load(sys.stdin.buffer)
    spec = importlib.util.spec_from_file_location("cubin", path)
    assert spec is not None and spec.loader is not None
    cubin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cubin)
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        for unit in (SimpleNamespace(**fields) for fields in units):
            try:
                _front(cubin.source(unit, folder), unit)
            except Exception as error:
                errors[unit.name] = f"{error}\n{unit.text}"
    json.dump(errors, sys.stdout)


def _front(source: Any, unit: Any) -> None:
    """The module that the first stage of Triton makes, verified."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": unit.warps, "num_stages": unit.stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    assert module.verify(), unit.text


if __name__ == "__main__":
    main()

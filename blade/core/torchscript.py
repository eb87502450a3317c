# SPDX-License-Identifier: Apache-2.0
"""Scripts, saves and loads as ``torch.jit`` does, without the warnings of its entry points.

    save(module, "model.pt"); load("model.pt")(x)      # torch.jit.save and torch.jit.load

From torch 2.14 on, each entry point of ``torch.jit`` begins with a FutureWarning, which users could do nothing about
where blade is the caller. What the entry points call is called here instead: a filter of warnings would hold for the
whole process, other threads and the user's own calls included.
"""

import os
from collections.abc import Callable
from typing import IO, Any

import torch
from torch.jit._recursive import wrap_cpp_module
from torch.jit._script import _script_impl  # type: ignore[attr-defined]
from torch.jit._serialization import validate_map_location

Place = str | os.PathLike[str]


def script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function without closures. Raises what ``torch.jit.script`` raises."""
    compiled: Callable[..., Any] = _script_impl(function, _frames_up=1)
    return compiled


def save(module: torch.jit.ScriptModule, place: Place) -> None:
    """Write the file of ``torch.jit.save``."""
    module.save(os.fspath(place))


def to_bytes(module: torch.jit.ScriptModule) -> bytes:
    """The contents of the file of ``torch.jit.save``."""
    saved: bytes = module.save_to_buffer()
    return saved


def load(source: Place | IO[bytes], map_location: str | None = None) -> torch.jit.ScriptModule:
    """Read what ``torch.jit.save`` wrote. Raises RuntimeError for a file that is none of its."""
    native: Any = torch._C  # its stubs lack arguments
    rest: Any = (validate_map_location(map_location), {}, False)
    unit = native.CompilationUnit()
    if isinstance(source, (str, os.PathLike)):
        read = native.import_ir_module(unit, os.fspath(source), *rest)
    else:
        read = native.import_ir_module_from_buffer(unit, source.read(), *rest)
    loaded: torch.jit.ScriptModule = wrap_cpp_module(read)
    return loaded

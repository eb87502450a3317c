# SPDX-License-Identifier: Apache-2.0
"""Pickle optimized modules by value, as their saved files.

    pickle.loads(pickle.dumps(optimized))(x)     # as torch.jit.load of what torch.jit.save wrote
    context.Process(target=serve, args=(optimized,))   # multiprocessing with "spawn"; joblib and Ray alike

torch gives no ScriptModule a pickled form. Those with a report get one here; others raise torch's error as
before. Whoever reads the pickle imports blade by it.
"""

import copyreg
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from blade.core import torchscript
from blade.report import ATTRIBUTE

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def _reduce(module: torch.jit.ScriptModule) -> Any:
    """The pickled form of ``module``: its file, if it has a report."""
    if not isinstance(getattr(module, ATTRIBUTE, None), str):
        return module.__reduce_ex__(2)
    return _load, (torchscript.to_bytes(module),)


def _load(saved: bytes) -> torch.jit.ScriptModule:
    return torchscript.load(io.BytesIO(saved))


def register() -> None:
    """Make ``pickle``, and what builds on it, use this form for modules of torch's class."""
    copyreg.pickle(RecursiveScriptModule, _reduce)

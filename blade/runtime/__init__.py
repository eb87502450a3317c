# SPDX-License-Identifier: Apache-2.0
"""The C++ runtime; its import registers ``torch.classes.blade.Engine``."""

from blade.runtime import cuda as cuda
from blade.runtime import model as model
from blade.runtime.engine import (
    Engine,
    LoadRunner,
    Runner,
    isa_features,
    make_engine,
    register_runner,
)

__all__ = ["Engine", "LoadRunner", "Runner", "isa_features", "make_engine", "register_runner"]

# SPDX-License-Identifier: Apache-2.0
"""Optimize PyTorch models: choose engines per subgraph, by measurement, at every shape, with a fallback.

    import blade

    optimized = blade.optimize(model, inputs)         # nn.Module -> ScriptModule
    print(blade.report(optimized))                    # what runs where, how fast, why not elsewhere
    torch.jit.save(optimized, "model.pt")             # to load it: import blade; torch.jit.load("model.pt")
    pipe.model = blade.accelerate(pipe.model)         # in place of the model: its class, arguments and outputs

Importing blade loads the C++ runtime, which files saved by ``torch.jit.save`` need. ``BLADE_LOG=info`` in the
environment prints one line per decision to stderr.
"""

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from blade import dynamo as dynamo
from blade.backends.registry import register_runners as _register_runners
from blade.core.reason import Code, Reason, Stage
from blade.errors import (
    BackendError,
    BladeError,
    BladeWarning,
    ConfigError,
    EngineError,
    InputError,
)
from blade.program.trust import Verified, sign, verify
from blade.report import Report, rearm, report, stats
from blade.report.pickling import register as _register_pickling
from blade.version import __version__

if TYPE_CHECKING:
    from blade.api import optimize
    from blade.config import Config
    from blade.dropin.accelerate import accelerate
    from blade.dropin.recording import record
    from blade.runtime.cmake import cmake_prefix_path
    from blade.runtime.engine import allow_ops
    from blade.saving.load_file import load
    from blade.saving.save_file import save
    from blade.selection.background import wait

try:
    from blade import runtime as runtime
except BackendError:
    # ``doctor`` must run without the runtime, to report its problems. While ``python -m blade`` looks for its module,
    # argv begins with "-m"; the console command is a file named blade.
    if [os.path.basename(name) for name in sys.argv[:1]] not in (["-m"], ["blade"]):
        raise
else:
    _register_runners()
    _register_pickling()
    try:
        importlib.import_module("blade.dynamo.cache_artifacts")
    except ImportError as _error:  # a torch without these artifacts
        logging.getLogger(__name__).info("no cache artifacts: %s", _error)

__all__ = [
    "BackendError",
    "BladeError",
    "BladeWarning",
    "Code",
    "Config",
    "ConfigError",
    "EngineError",
    "InputError",
    "Reason",
    "Report",
    "Stage",
    "Verified",
    "__version__",
    "accelerate",
    "allow_ops",
    "cmake_prefix_path",
    "load",
    "optimize",
    "rearm",
    "record",
    "report",
    "save",
    "sign",
    "stats",
    "verify",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Import the compiler, and the library that checks a ``Config``, late: saved files do not need them."""
    places = {
        "Config": "blade.config",
        "accelerate": "blade.dropin.accelerate",
        "allow_ops": "blade.runtime.engine",
        "cmake_prefix_path": "blade.runtime.cmake",
        "load": "blade.saving.load_file",
        "optimize": "blade.api",
        "record": "blade.dropin.recording",
        "save": "blade.saving.save_file",
        "wait": "blade.selection.background",
    }
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(places[name]), name)
    globals()[name] = found
    return found


def _set_up_logging(level: str) -> None:
    """Set the log level; like other libraries, blade is silent unless the environment sets one."""
    log = logging.getLogger("blade")
    log.addHandler(logging.NullHandler())
    if not level:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    log.addHandler(handler)
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if level.upper() in allowed:
        log.setLevel(level.upper())
    else:
        log.warning("BLADE_LOG=%r: expected one of %s", level, ", ".join(allowed).lower())


_set_up_logging(os.environ.get("BLADE_LOG", ""))

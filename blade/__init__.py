# SPDX-License-Identifier: Apache-2.0
"""Faster PyTorch models: per subgraph, by measurement, at every shape, never broken.

    import blade

    optimized = blade.optimize(model, inputs)         # nn.Module -> ScriptModule
    print(blade.report(optimized))                    # what runs where, how fast, why not elsewhere
    torch.jit.save(optimized, "model.pt")             # elsewhere: import blade; torch.jit.load("model.pt")

Importing loads the C++ runtime, which files saved by ``torch.jit.save`` need. ``BLADE_LOG=info`` in the
environment prints one line per decision to stderr.
"""

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from blade.config import Config
from blade.dynamo.announce import announce as _announce
from blade.errors import BackendError, BladeError, ConfigError, InputError
from blade.reason import Code, Reason, Stage
from blade.report import Report, rearm, report, stats
from blade.version import __version__

if TYPE_CHECKING:
    from blade.api import optimize
    from blade.fallback.background import wait

try:
    from blade import runtime as runtime
    from blade.runtime.runners import announce_runners
except BackendError:
    # While ``python -m blade`` looks for its module, Python puts this in argv: ``doctor`` has to be able
    # to say what is wrong with the runtime.
    if sys.argv[:1] != ["-m"]:
        raise
else:
    announce_runners()

__all__ = [
    "BackendError",
    "BladeError",
    "Code",
    "Config",
    "ConfigError",
    "InputError",
    "Reason",
    "Report",
    "Stage",
    "__version__",
    "optimize",
    "rearm",
    "report",
    "stats",
    "wait",
]


def __getattr__(name: str) -> Any:
    """``optimize`` brings the whole compiler: a process that only runs saved files does without."""
    places = {"optimize": "blade.api", "wait": "blade.fallback.background"}
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(places[name]), name)
    globals()[name] = found
    return found


def _set_up_logging(level: str) -> None:
    """Silent, as a library should be, unless the environment asks for more."""
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
_announce()

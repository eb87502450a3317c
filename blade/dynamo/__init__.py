# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="disc")`` and ``backend="aot_disc"``: the second way into the pipeline.

compiled = torch.compile(model, backend="disc", options={"min_cluster_size": 5})
for report in blade.dynamo.reports(): print(report)      # one per graph that Dynamo handed over
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blade.dynamo.backends import aot_disc, disc
    from blade.dynamo.kept import reports, stats

__all__ = ["aot_disc", "disc", "reports", "stats"]

_PLACES = {"disc": "backends", "aot_disc": "backends", "reports": "kept", "stats": "kept"}


def __getattr__(name: str) -> Any:
    """Late: ``import blade`` comes through here and must not bring Dynamo and the compiler."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found

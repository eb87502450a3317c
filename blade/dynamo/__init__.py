# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="disc")`` and ``backend="aot_disc"``: the second entrance to the pipeline.

compiled = torch.compile(model, backend="disc", options={"min_cluster_size": 5})
for report in blade.dynamo.reports(): print(report)      # one per graph of Dynamo's

torch finds both names through the entry points of the installed package, with or without ``import blade``. If
blade is imported from a folder without being installed, torch raises "Invalid backend": pass
``backend=blade.dynamo.disc`` instead.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blade.dynamo.backends import aot_disc, disc
    from blade.dynamo.background import wait
    from blade.dynamo.live_graphs import reports, stats

__all__ = ["aot_disc", "disc", "reports", "stats", "wait"]

_PLACES = {
    "disc": "backends",
    "aot_disc": "backends",
    "reports": "live_graphs",
    "stats": "live_graphs",
    "wait": "background",
}


def __getattr__(name: str) -> Any:
    """Import late: ``import blade`` runs this module and must not import Dynamo and the compiler."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found

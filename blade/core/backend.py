# SPDX-License-Identifier: Apache-2.0
"""The contract between blade and a backend: ``Backend``, the class to subclass, and the values it is given.

A backend says whether it can work here at all (``why_unavailable``), which nodes it takes
(``why_not``) and turns a cluster of such nodes into an engine (``convert``). It receives the cluster
as FX over ATen ops with symbolic shapes; it never sees TorchScript.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason

if TYPE_CHECKING:
    from blade.config import Config


class Backend(ABC):
    """Base class of all backends: three abstract methods, and defaults for everything else.

    The registry refuses objects of other classes. It has a row for each built-in backend; other packages add
    theirs with entry points, and a script with ``registry.register``.

    A subclass overrides an attribute or a property with a class attribute, or with a property where the value
    depends on the machine.
    """

    name: str
    """The name in ``Config.optimization_pipeline`` (in any case), in reports and in the engines it makes."""

    in_process: bool = False
    """Whether ``convert`` runs in this process. By default the backend is pickled into a process of its own, where
    it may hang or crash; ``True`` promises that conversions do neither."""

    reduced_precision: bool = False
    """Whether its engines are always less exact than the original, on purpose (int8, fp8). Such a backend is used
    only if the config permits that; its engines are verified against ``Config.accuracy_budget``."""

    watches_constants: bool = False
    """Whether its engines notice writes to constants that bump no version counter, such as through ``.data``.
    If they do not, ``torch.compile`` checks for such writes before each call."""

    takes_loops: bool = False
    """Whether ``convert`` accepts clusters with loops (``graph/shapes/loops.py``) whose ops it takes."""

    summary: str | None = None
    """A remark that ``python -m blade doctor`` prints after the version."""

    sizes_from_elements: bool = False
    """Whether it takes ops whose results have sizes that depend on elements (``nonzero``, a mask as index), and
    whatever follows from such sizes. ``why_not`` is asked about such ops only if so."""

    @property
    def reduced_precision_with(self) -> Collection[str]:
        """Fields of ``Config`` that permit an otherwise exact backend to be less exact: ``("enable_fp16",)``.

        Its engines are verified against ``Config.accuracy_budget`` if one of these fields is set.
        """
        return ()

    @property
    def precisions(self) -> Collection[str]:
        """The reduced precisions it can compute in on this machine: "fp16", "bf16", "int8", "fp8"."""
        return ()

    @property
    def version(self) -> str | None:
        """A text that differs whenever its engines for the same cluster and config may differ.

        It is part of the cache key of engines, verdicts and timings; with ``None`` they are not cached.
        ``python -m blade doctor`` prints its first line. It is read only if the backend is available.
        """
        return None

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """``None`` if the backend works in this process, else a sentence with the fix."""

    @abstractmethod
    def why_not(self, node: OpNode, config: "Config") -> Reason | None:
        """``None`` if ``convert`` accepts ``node``; both read the same table."""

    @abstractmethod
    def convert(self, cluster: Cluster, config: "Config") -> torch.ScriptObject:
        """Compile ``cluster`` to a ``torch.classes.blade.Engine``; raises on failure.

        DISC's engines are native code. The engines of other backends run in a Python function, the *runner*.
        A saved file needs the runner, but not the backend: the registry has a row for it, other packages
        declare an entry point in the group ``blade.runners``, and a script calls
        ``runtime.engine.register_runner``.
        """

    # Optional hooks, which do nothing by default.

    def warm_up(self, device: torch.device) -> None:  # noqa: B027
        """Start slow initialization, as a model on ``device`` is about to be captured. Returns at once."""

    def survey(self, nodes: Sequence[OpNode], config: "Config") -> None:  # noqa: B027
        """Read all nodes of a graph before ``why_not`` is called on each, to query a library once for many."""

    def estimate_s(self, cluster: Cluster) -> float:
        """About how many seconds ``convert`` will take; 0 means unknown.

        A conversion that does not fit into the remaining ``Config.time_budget`` is not started.
        """
        return 0.0

# SPDX-License-Identifier: Apache-2.0
"""Support by a library that can list its own ops.

    OPS = OpSurvey("inductor", "Inductor", dtypes, version, ask)
    OPS.why_not(node, keep=True)        # None, or the Reason

Listing may import a compiler, which takes seconds and hundreds of MB: another process does so, and the answer
is cached on disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module

import torch

from blade.core.cluster import OpNode, values_in
from blade.core.disk_cache import digest, open_cache
from blade.core.reason import Code, Reason, Stage
from blade.core.torch_modes import is_composite
from blade.process.child import NoAnswer, SpawnedProcess
from blade.process.frames import Requests

DEADLINE_S = 600.0  # importing a compiler from a cold disk, on a busy machine
_KIND = "ops"

_LOOKUPS = (
    "embedding embedding_bag gather index index_add index_copy index_fill index_put index_reduce index_select "
    "nll_loss nll_loss_nd nll_loss2d cross_entropy_loss one_hot put scatter scatter_add scatter_reduce take "
    "take_along_dim _unsafe_index _unsafe_index_put _unsafe_masked_index"
)


def lookups(why: str) -> dict[str, str]:
    """Every op that reads or writes at the positions in an index tensor; for ``OpSurvey.refused``."""
    return {f"aten.{name}": why for name in _LOOKUPS.split()}


@dataclass(frozen=True, eq=False)
class OpSurvey:
    """``ask`` returns the ops in the form of ``str(overload)``, "aten.add.Tensor"; it is a module-level
    function, called in a process of its own. ``version``: what the answer depends on. ``dtypes``: supported
    dtypes of tensors on the CPU. ``refused``: listed ops that are declined, without overload
    ("aten.embedding"), and why."""

    backend: str
    library: str
    dtypes: frozenset[torch.dtype]
    version: Callable[[], str]
    ask: Callable[[], Iterable[str]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, node: OpNode, keep: bool) -> Reason | None:
        """``None`` if the library supports ``node``. ``keep``: the answer may be cached on disk."""
        for value in values_in((*node.args, *node.kwargs.values(), *node.outputs)):
            if value.kind != "tensor":
                continue
            if value.dtype not in self.dtypes:
                why = f"it is given no tensors of {value.dtype}"
                return self._reason(Code.UNSUPPORTED_DTYPE, node, why)
            if value.device is None or value.device.type != "cpu":
                why = f"it compiles for the CPU, not for {value.device}"
                return self._reason(Code.UNSUPPORTED_DEVICE, node, why)
        if (against := self.refused.get(str(node.target.overloadpacket))) is not None:
            return self._reason(Code.UNSUPPORTED_OP, node, against)
        names = _names(self, keep)
        if isinstance(names, str):
            return self._reason(Code.UNSUPPORTED_OP, node, names)
        is_decomposed = is_composite(node.target.name())  # by exporting
        if is_decomposed or str(node.target) in names:
            return None
        return self._reason(Code.UNSUPPORTED_OP, node, "it has no rule for this op")

    def _reason(self, code: Code, node: OpNode, why: str) -> Reason:
        detail = f"{node.target} does not go to {self.library}: {why}."
        return Reason(Stage.SUPPORT, code, self.backend, node.name, detail)


@lru_cache(maxsize=16)
def _names(ops: OpSurvey, keep: bool) -> frozenset[str] | str:
    """The result of ``ops.ask``, or why there is none."""
    cache = open_cache(keep)
    key = digest([ops.backend, ops.version(), torch.__version__])
    kept = None if cache is None else cache.get(_KIND, key)
    if kept is not None:
        return frozenset(kept.decode().split())
    names = _ask_elsewhere(ops)
    if cache is not None and not isinstance(names, str):
        cache.put(_KIND, key, " ".join(names).encode())
    return names if isinstance(names, str) else frozenset(names)


def _ask_elsewhere(ops: OpSurvey) -> list[str] | str:
    with SpawnedProcess(_serve, ops.ask.__module__, ops.ask.__name__) as child:
        try:
            names: list[str] = child.answer(DEADLINE_S)
        except NoAnswer as error:
            last = (error.output or f"it {error}").splitlines()[-1]
            return f"asking it which ops it takes fails ({last})"
    return names


def _serve(requests: Requests, module: str, name: str) -> None:
    """The main function of the child process, which answers without a request."""
    requests.answer(sorted(set(getattr(import_module(module), name)())))

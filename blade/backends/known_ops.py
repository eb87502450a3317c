# SPDX-License-Identifier: Apache-2.0
"""Which nodes a library takes, when the library itself can name its ops.

    OPS = KnownOps("inductor", "Inductor", dtypes, version, ask)
    OPS.why_not(node, keep=True)        # None, or the Reason

Asking may mean to import a compiler, which takes seconds and hundreds of MB: another process is asked, and the
answer is kept on disk.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from blade.backends.base import OpNode, values_in
from blade.cache import digest, open_cache
from blade.reason import Code, Reason, Stage

_KIND = "ops"


_LOOKUPS = (
    "embedding embedding_bag gather index index_add index_copy index_fill index_put index_reduce index_select "
    "nll_loss nll_loss_nd nll_loss2d cross_entropy_loss one_hot put scatter scatter_add scatter_reduce take "
    "take_along_dim _unsafe_index _unsafe_index_put _unsafe_masked_index"
)


def lookups(why: str) -> dict[str, str]:
    """Every op that reads or writes where a tensor of indices says; for ``KnownOps.refused``."""
    return {f"aten.{name}": why for name in _LOOKUPS.split()}


@dataclass(frozen=True, eq=False)
class KnownOps:
    """``ask`` gives the ops as ``str(overload)`` has them, "aten.add.Tensor"; it is a function of a module, to be
    called in a process of its own. ``version`` is what the answer depends on. ``dtypes``: of the tensors it can be
    given, on the CPU. ``refused``: ops that are not wanted of it all the same, without overload
    ("aten.embedding"), and why."""

    backend: str
    library: str
    dtypes: frozenset[torch.dtype]
    version: Callable[[], str]
    ask: Callable[[], Iterable[str]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, node: OpNode, keep: bool) -> Reason | None:
        """``None`` if the library takes ``node``. ``keep``: its answer may be kept on disk."""
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
        if str(node.target) in names or _is_composite(node.target):
            return None
        return self._reason(Code.UNSUPPORTED_OP, node, "it has no rule for this op")

    def _reason(self, code: Code, node: OpNode, why: str) -> Reason:
        detail = f"{node.target} does not go to {self.library}: {why}."
        return Reason(Stage.SUPPORT, code, self.backend, node.name, detail)


@lru_cache(maxsize=16)
def _names(ops: KnownOps, keep: bool) -> frozenset[str] | str:
    """What ``ops.ask`` gives, or why it does not."""
    cache = open_cache(keep)
    key = digest([ops.backend, ops.version(), torch.__version__])
    kept = None if cache is None else cache.get(_KIND, key)
    if kept is not None:
        return frozenset(kept.decode().split())
    names = _ask_elsewhere(ops)
    if cache is not None and not isinstance(names, str):
        cache.put(_KIND, key, " ".join(names).encode())
    return names if isinstance(names, str) else frozenset(names)


def _ask_elsewhere(ops: KnownOps) -> list[str] | str:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {ops.ask.__module__} import {ops.ask.__name__} as ask; print(*ask())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        return f"asking it which ops it takes fails ({last})"
    return sorted(set(done.stdout.split()))


def _is_composite(target: torch._ops.OpOverload) -> bool:
    """Made of other ops, into which exporting takes it apart."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key))

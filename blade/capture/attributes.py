# SPDX-License-Identifier: Apache-2.0
"""The attributes that a ScriptModule's forward reads or writes, nested modules included."""

from dataclasses import dataclass
from typing import Any

import torch

from blade.core.jit_nodes import nodes_of
from blade.graph.torchscript.alias import STRUCTURE


@dataclass(frozen=True)
class Attribute:
    """One attribute: ``owner.name``."""

    owner: Any  # torch._C.ScriptModule
    name: str

    def get(self) -> Any:
        """Return the value; containers are copies."""
        return self.owner.getattr(self.name)

    def set(self, value: Any) -> None:
        """Rebind the attribute."""
        self.owner.setattr(self.name, value)


def attributes_of(module: torch.jit.ScriptModule) -> list[Attribute]:
    """Return every attribute that is no module and that ``module``'s forward accesses, once each."""
    if not module._c._has_method("forward"):
        return []
    graph = module.inlined_graph
    itself = next(graph.inputs())
    owners: dict[str, tuple[str, Any]] = {itself.debugName(): ("", module._c)}
    found: dict[str, Attribute] = {}
    for node in nodes_of(graph):
        if node.kind() not in ("prim::GetAttr", "prim::SetAttr"):
            continue
        if (place := owners.get(node.inputsAt(0).debugName())) is None:
            continue
        path, owner = f"{place[0]}.{node.s('name')}", place[1]
        value = owner.getattr(node.s("name"))
        if not isinstance(value, torch._C.ScriptModule):
            found[path] = Attribute(owner, node.s("name"))
        elif node.kind() == "prim::GetAttr":
            owners[node.output().debugName()] = (path, value)
    return list(found.values())


def may_write(module: torch.jit.ScriptModule) -> bool:
    """Whether ``module``'s forward has an op that writes to a tensor that it did not create, or an opaque
    call. Engines do not write (``verify`` checks that)."""
    if not module._c._has_method("forward"):
        return True
    parts = [(name.rpartition(".")[2], part) for name, part in module.named_modules()]

    def calls_one_that_may(node: Any) -> bool:
        """Check a submodule called through an interface, which is not inlined."""
        owner = node.inputsAt(0).node()
        if owner.kind() != "prim::GetAttr" or node.s("name") != "forward":
            return True
        found = [part for name, part in parts if name == owner.s("name")]
        return not found or any(map(may_write, found))

    graph = module.inlined_graph  # keeps its nodes alive
    calls = [node for node in nodes_of(graph) if _may_write(node)]
    return any(node.kind() != "prim::CallMethod" or calls_one_that_may(node) for node in calls)


def _may_write(node: Any) -> bool:
    kind = node.kind()
    if kind == "prim::CallMethod":
        return "torch.classes.blade.Engine" not in str(node.inputsAt(0).type())
    if kind in _LOOKED_INTO:
        return False
    schema = node.schema()
    return "!" in schema if schema != "(no schema)" else kind not in STRUCTURE


_LOOKED_INTO = frozenset("prim::If prim::Loop prim::RaiseException prim::Print".split())

# SPDX-License-Identifier: Apache-2.0
"""The checks of decisions in a captured graph: branches that raise unless Python's decision would be the same.

    for check in checks_of(graph):        # if bool(t) != True: raise RuntimeError("blade decision 3")
        check.index, check.fails          # 3, the value of the condition

Capture writes them (``capture/decisions``). Nothing after a check may run before it has passed, so a check is a
barrier to clusters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from blade.core import torchscript
from blade.graph.torchscript.program import nested

MARK = "blade decision "
"""The text of a check is this and the index of its decision, until ``describe_checks`` writes the message."""

NO_PATH = "No captured path answers this call"
"""How the message of every check begins."""

LIMITED = 1_000_003
"""The number of the checks of sizes outside of which a trace is wrong; they have their messages from the start."""

_MARKED = re.compile(f"{MARK}([0-9]+)$|{NO_PATH} \\[([0-9]+)\\]")


@dataclass(frozen=True)
class Check:
    """One check: its ``prim::If``, whose condition ``fails``, the decision's index and the text it raises."""

    node: torch._C.Node
    index: int
    text: str

    @property
    def fails(self) -> torch._C.Value:
        return next(self.node.inputs())


def checks_of(graph: torch._C.Graph) -> Iterator[Check]:
    """Yield the checks in ``graph``, those in nested blocks included."""
    for node in graph.nodes():
        for inner in (node, *nested(node)):
            if (found := check_of(inner)) is not None:
                yield found


def check_of(node: torch._C.Node) -> Check | None:
    """``node`` as a check, ``None`` if it is none."""
    if node.kind() != "prim::If" or node.outputsSize():
        return None
    first, second = node.blocks()
    raised = [n for n in first.nodes() if n.kind() == "prim::RaiseException"]
    if len(raised) != 1 or any(True for _ in second.nodes()):
        return None
    text = next(raised[0].inputs()).node()
    if text.kind() != "prim::Constant" or not text.hasAttribute("value"):
        return None
    if text.kindOf("value") != "s" or (found := _MARKED.match(text.s("value"))) is None:
        return None
    return Check(node, int(found[1] or found[2]), text.s("value"))


def drop_check(graph: torch._C.Graph, index: int) -> None:
    """Remove the check of decision ``index``, and what only it needs."""
    for check in [one for one in checks_of(graph) if one.index == index]:
        check.node.destroy()
    torchscript.remove_dead_code(graph)


def describe_checks(graph: torch._C.Graph, describe: Callable[[int], str]) -> None:
    """Write ``describe(index)`` as the message of each check that has none yet."""
    own: Any = graph
    for check in list(checks_of(graph)):
        if not check.text.startswith(MARK):
            continue
        raised = next(n for n in nested(check.node) if n.kind() == "prim::RaiseException")
        own.setInsertPoint(raised)
        raised.replaceInput(
            0, own.insertConstant(f"{NO_PATH} [{check.index}]: {describe(check.index)}")
        )
    own.setInsertPoint(own.block())
    torchscript.remove_dead_code(graph)

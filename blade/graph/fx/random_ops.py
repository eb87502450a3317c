# SPDX-License-Identifier: Apache-2.0
"""The arguments of an op, and whether they make an op that may draw random numbers deterministic."""

from typing import Any

import torch
from torch.fx import Node

from blade.core.cluster import OpNode

# Argument name of ops that may draw random numbers -> values for which they draw none.
QUIET: dict[str, tuple[object, ...]] = {
    "train": (False,),
    "training": (False,),
    "dropout": (0, 0.0),
    "dropout_p": (0, 0.0),
}


aten = torch.ops.aten
# Ops that draw from torch's default generator, in the order of the result's elements and by their dtype.
DRAWING = (
    aten.native_dropout.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.rand.default,
    aten.rand_like.default,
    aten.randn.default,
    aten.randn_like.default,
)


# Ops whose result is memory that was not written.
BLANK = (
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided),
)


def given(node: OpNode, argument: Any) -> Any:
    """The value that ``node`` passes for ``argument`` of its schema, or the default."""
    position = [a.name for a in node.target._schema.arguments].index(argument.name)
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(argument.name, argument.default_value)


def draws_nothing(node: OpNode) -> bool:
    """Whether these arguments make a random op (dropout, attention, a recurrent net) deterministic."""
    arguments = [a for a in node.target._schema.arguments if a.name in QUIET]
    return any(given(node, a) in QUIET[a.name] for a in arguments)


def may_draw(node: Node) -> bool:
    """Whether the op draws with some arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

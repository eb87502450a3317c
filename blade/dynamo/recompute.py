# SPDX-License-Identifier: Apache-2.0
"""What the min-cut between forward and backward knows of ops that DISC computes in its own kernels.

    with fused_ops_known():
        min_cut_rematerialization_partition(joint, ...)

torch knows ops as Inductor decomposes them. Here norms, softmax, activations and their gradients stay whole, and an op
that torch does not know counts as one that reads its operands from memory. So what a norm reads is saved in float32
although it was widened from 16 bits, or saved twice: as a product, and as the activation that its gradient reads.
DISC fuses these ops with the pointwise ops that make their operands, as Inductor does once they are decomposed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet

from blade.backends.disc.frontend.ops import (
    activation,
    activation_backward,
    batch_norm,
    factory,
    layout,
    loss,
    norm,
    norm_backward,
    pointwise,
    reduction,
    region,
)
from blade.backends.disc.frontend.ops.table import TABLE
from blade.core.torch_modes import is_composite
from blade.dynamo.recomputed_norms import normalized
from blade.graph.fx.views import is_view

Packets = OrderedSet[Any]
_CHEAP = (activation, activation_backward, factory, layout, pointwise, region)
_FUSED = (*_CHEAP, batch_norm, loss, norm, norm_backward, reduction)
"""Modules of rows: those of ops that may be computed again in backward, and those of ops that fuse."""


@contextmanager
def fused_ops_known() -> Iterator[None]:
    """A context in which torch's min-cut fuses, recomputes and looks through ops as DISC does."""
    before = partitioners.get_default_op_list

    def with_ours() -> Any:
        known = before()
        return replace(
            known,
            fusible_ops=known.fusible_ops | packets_of(_FUSED) | {normalized},
            recomputable_ops=known.recomputable_ops | packets_of(_CHEAP) | {normalized},
            view_ops=known.view_ops | _views(),
        )

    partitioners.get_default_op_list = with_ours
    try:
        yield
    finally:
        partitioners.get_default_op_list = before


@cache
def packets_of(modules: tuple[Any, ...]) -> Packets:
    """The ops that ``modules`` of rows lower."""
    names = {module.__name__ for module in modules}
    return OrderedSet(
        target._overloadpacket for target, rule in TABLE.items() if rule.__module__ in names
    )


@cache
def _views() -> Packets:
    """Ops that return their operand's memory in another form, or parts of it."""
    return OrderedSet(
        target._overloadpacket
        for target, rule in TABLE.items()
        # what is composite is a conversion, or several ops
        if rule.__module__ == layout.__name__
        and is_view(target)
        and not is_composite(target.name())
    )

# SPDX-License-Identifier: Apache-2.0
"""The relations between sizes on which a cluster's shapes rely, each with where it was asked.

    for relation, where in relied_on(cluster.gm, cluster.shape_env): ...    # Eq(s0, s1), "broadcast_shapes"

torch asks far more than its answers matter for; what only chose strides is left out. Exporters trace
the graph again in the same ``ShapeEnv``, and what they settle on the way (they decompose ops) is no
matter of strides: ``end_of_own`` says where the cluster's own guards end, and all others count.
"""

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.exchange.unit_sizes import UnitSizes


def relied_on(gm: GraphModule, shape_env: ShapeEnv) -> Iterator[tuple[sympy.Basic, str]]:
    """Every relation that sizes other than the sample's have to satisfy, in the order of asking."""
    units = UnitSizes(gm, shape_env)
    fixed = _ranks_are_fixed(gm)
    own = getattr(shape_env, _OWN, len(shape_env.guards))
    for position, guard in enumerate(shape_env.guards):
        relation = shape_env.replace(guard.expr)
        if _chose_a_layout(guard):
            continue
        if position < own:
            known = fixed and _is_not_one(relation)
            if known or units.only_chose_strides(relation):
                continue
        elif _ordered_strides(guard):
            continue
        yield relation, _where(guard)


def end_of_own(shape_env: ShapeEnv) -> None:
    """From now on guards come from an exporter. (Once said, it stays: a cluster may be exported twice.)"""
    if not hasattr(shape_env, _OWN):
        setattr(shape_env, _OWN, len(shape_env.guards))


_OWN = "_blade_own_guards"


def _ranks_are_fixed(gm: GraphModule) -> bool:
    """Is no size of 1 dropped on the way? Then "is this 1?" was only asked to choose strides.

    (Where a broadcast depends on the answer, torch also records which sizes are equal.)
    """
    return not any(str(n.target).startswith("aten.squeeze.") for n in gm.graph.nodes)


def _is_not_one(relation: Any) -> bool:
    """Of one size, or of a number of elements, which is a product of sizes."""
    if not isinstance(relation, sympy.Ne) or relation.rhs != 1:
        return False
    return all(factor.is_symbol for factor in sympy.Mul.make_args(relation.lhs))


def _chose_a_layout(guard: Any) -> bool:
    """Was it asked by torch's choice of how to compute something? That decides only the strides, or nothing."""
    frame = guard.sloc.framework_loc
    asked = (getattr(frame, "name", ""), getattr(frame, "filename", "").rpartition("/")[2])
    return asked in _CHOICES


_CHOICES = {
    ("conv", "fake_impls.py"),  # the library for a convolution
    (
        "matmul",
        "decompositions.py",
    ),  # whether to fold axes of a product, which exports keep as it is
    (
        "div_rtn",
        "_meta_registrations.py",
    ),  # before torch 2.12: whether a division by a stride has a remainder, which // takes care of
}


_ORDERING = {"_compute_stride": "fake_impls.py", "evaluate": "_inductor/utils.py"}
"""What asks whether a size is 1 to find the strides of a view, or to sort axes by their strides."""


def _ordered_strides(guard: Any) -> bool:
    """Was it only asked how axes lie? An axis of size 1 lies anywhere: what was found for more holds too."""
    frame = guard.sloc.framework_loc
    file = _ORDERING.get(getattr(frame, "name", ""))
    return file is not None and frame.filename.endswith(file) and _holds_beyond_one(guard.expr)


def _holds_beyond_one(relation: Any) -> bool:
    """It can fail for sizes of 1 alone, as far as a few others tell."""
    symbols = sorted(relation.free_symbols, key=str)
    return all(
        relation.subs({s: size + step * k for k, s in enumerate(symbols)}) == sympy.true
        for size in (2, 3, 64)
        for step in (0, 1, 5)
    )


def _where(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return f"{frame.name}" if hasattr(frame, "name") else ""

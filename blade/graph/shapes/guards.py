# SPDX-License-Identifier: Apache-2.0
"""The relations between sizes on which a cluster's shapes rely, each with the function that required it.

    for relation, where in relied_on(cluster.gm, cluster.shape_env): ...    # Eq(s0, s1), "broadcast_shapes"

torch records many guards that do not matter; those that only chose strides are left out. Exporters trace
the graph again in the same ``ShapeEnv``, and their guards (they decompose ops) concern more than strides:
``end_of_own`` marks where the cluster's own guards end, and all later ones count.
"""

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.graph.shapes.loops import all_nodes, counts, for_every_iteration
from blade.graph.shapes.stride_only_guards import StrideOnlyGuards
from blade.graph.shapes.symbolic import is_late


def relied_on(gm: GraphModule, shape_env: ShapeEnv) -> Iterator[tuple[sympy.Basic, str]]:
    """Every relation that sizes other than the sample's must satisfy, in the order recorded."""
    units = StrideOnlyGuards(gm, shape_env)
    fixed = _ranks_are_fixed(gm)
    trips = {index: shape_env.replace(count) for index, count in counts(gm).items()}
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
        yield for_every_iteration(relation, trips), _where(guard)
    yield from _on_late_sizes(shape_env)


def _on_late_sizes(shape_env: ShapeEnv) -> Iterator[tuple[sympy.Basic, str]]:
    """The relations that concern sizes that depend on elements: an equality also renames such a size, and must
    not become true by that. Sizes of inputs have the names that all else knows them by.
    """

    def renamed(size: sympy.Symbol) -> sympy.Basic:
        found: sympy.Basic = size if is_late(size) else shape_env.replace(size)
        return size if any(map(is_late, found.free_symbols)) else found

    for assertions in shape_env.deferred_runtime_asserts.values():
        for one in assertions:
            names = {size: renamed(size) for size in one.expr.free_symbols}
            yield one.expr.xreplace(names), one.msg.split("\n")[0]


def end_of_own(shape_env: ShapeEnv) -> None:
    """Count further guards as an exporter's. A second call has no effect: clusters may be exported twice."""
    if not hasattr(shape_env, _OWN):
        setattr(shape_env, _OWN, len(shape_env.guards))


_OWN = "_blade_own_guards"


def _ranks_are_fixed(gm: GraphModule) -> bool:
    """Whether no op drops axes of size 1; then "is this 1?" was only asked to choose strides.

    (If a broadcast depends on the answer, torch also records which sizes are equal.)
    """
    return not any(str(n.target).startswith("aten.squeeze.") for n in all_nodes(gm))


def _is_not_one(relation: Any) -> bool:
    """Whether the relation says that a size or a product of sizes (a number of elements) is not 1."""
    if not isinstance(relation, sympy.Ne) or relation.rhs != 1:
        return False
    return all(factor.is_symbol for factor in sympy.Mul.make_args(relation.lhs))


def _chose_a_layout(guard: Any) -> bool:
    """Whether torch asked in order to choose an implementation: this affects at most the strides."""
    frame = guard.sloc.framework_loc
    asked = (getattr(frame, "name", ""), getattr(frame, "filename", "").rpartition("/")[2])
    return asked in _CHOICES


_CHOICES = {
    ("conv", "fake_impls.py"),  # chooses a convolution library
    (
        "matmul",
        "decompositions.py",
    ),  # chooses whether to fold axes of a product, which exports keep unfolded
    (
        "div_rtn",
        "_meta_registrations.py",
    ),  # before torch 2.12: asks whether a division by a stride has a remainder, which // handles
}


_ORDERING = {"_compute_stride": "fake_impls.py", "evaluate": "_inductor/utils.py"}
"""Functions that ask whether a size is 1 to find strides of a view, or to sort axes by stride."""


def _ordered_strides(guard: Any) -> bool:
    """Whether torch asked only about the order of axes. Axes of size 1 have any order, so 1 is no
    exception.
    """
    frame = guard.sloc.framework_loc
    file = _ORDERING.get(getattr(frame, "name", ""))
    return file is not None and frame.filename.endswith(file) and _holds_beyond_one(guard.expr)


def _holds_beyond_one(relation: Any) -> bool:
    """Whether only sizes of 1 can violate the relation, judged by a few other sizes."""
    symbols = sorted(relation.free_symbols, key=str)
    return all(
        relation.subs({s: size + step * k for k, s in enumerate(symbols)}) == sympy.true
        for size in (2, 3, 64)
        for step in (0, 1, 5)
    )


def _where(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return f"{frame.name}" if hasattr(frame, "name") else ""

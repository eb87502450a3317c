# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on elements: what is relied on, and what only chose strides."""

from typing import Any

import sympy
import torch
from cutting import cut, trace

from blade.graph.shapes.guards import relied_on
from blade.graph.shapes.symbolic import is_late


def relations(model: Any, *samples: tuple[torch.Tensor, ...]) -> list[sympy.Basic]:
    [extracted] = cut(trace(model, *samples))
    cluster = extracted.cluster
    return [relation for relation, _ in relied_on(cluster.gm, cluster.shape_env)]


def test_a_selection_relies_on_nothing() -> None:
    x = torch.randn(4, 3)
    found = relations(lambda v: torch.exp(v[v > 0]) + 1, (x,), (torch.randn(5, 2),))
    assert found == []


def test_a_size_that_has_to_be_equal_is_relied_on_by_its_own_name() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    [relation] = relations(lambda v, w: v[v > 0] * w, (x, torch.randn(2)))
    assert isinstance(relation, sympy.Eq)
    assert len(list(filter(is_late, relation.free_symbols))) == 1


def test_sizes_of_inputs_in_it_have_the_names_that_equalities_left() -> None:
    x, kept = torch.tensor([1.0, -1.0, 2.0]), torch.randn(2)
    [extracted] = cut(trace(lambda v, w, y: v[v > 0] * w + (w + y), (x, kept, kept + 1)))
    gm, env = extracted.cluster.gm, extracted.cluster.shape_env
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    known = {env.replace(size.node.expr) for one in inputs for size in one.shape}
    for relation, _ in relied_on(gm, env):
        assert {s for s in relation.free_symbols if not is_late(s)} <= known


def test_only_symbols_that_torch_calls_unbacked_are_late() -> None:
    assert not is_late(sympy.Symbol("s0")) and not is_late(sympy.Integer(3))
    assert is_late(sympy.Symbol("u0"))


def test_questions_about_strides_are_dropped_beside_a_selection() -> None:
    """A layer norm asks whether a batch is of one row; the selection must not keep that as a guard."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x[x[:, 0] > 0]
        return torch.nn.functional.layer_norm(x, [4]), torch.nn.functional.layer_norm(kept, [4])

    found = relations(model, (torch.randn(3, 4),), (torch.randn(5, 4),))
    assert not [r for r in found if isinstance(r, sympy.Ne)]

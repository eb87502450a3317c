# SPDX-License-Identifier: Apache-2.0
"""Which of the questions that torch asked about sizes a cluster relies on."""

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from op_trace import trace
from sympy import Eq, Mod, Ne

from blade.graph.shapes.guards import relied_on

UNKNOWN = sympy.Symbol(
    "u", integer=True
)  # it has no value at the sample's sizes, so nothing can be tried


def asked(relation: sympy.Basic, function: str, file: str) -> Any:
    """A guard that torch recorded when ``function`` wanted to know."""
    frame = SimpleNamespace(name=function, filename=f"/site-packages/torch/{file}")
    return SimpleNamespace(expr=relation, sloc=SimpleNamespace(framework_loc=frame))


def found(guard: Any) -> list[sympy.Basic]:
    gm, shape_env = trace(lambda x: x * 2, [torch.randn(4, 6)], [(True, True)])
    a, b = (size.node.expr for size in next(iter(gm.graph.nodes)).meta["val"].shape)
    assert list(relied_on(gm, shape_env)) == []
    shape_env.guards.append(guard(a, b))
    return [relation for relation, _ in relied_on(gm, shape_env)]


@pytest.mark.parametrize(
    "guard",
    [
        lambda a, b: asked(Ne(a, 1), "is_contiguous", "_prims_common/__init__.py"),
        lambda a, b: asked(Ne(a * UNKNOWN, 1), "is_contiguous", "_prims_common/__init__.py"),
        lambda a, b: asked(Eq(Mod(a - 2, 2), 0), "div_rtn", "_meta_registrations.py"),
        lambda a, b: asked(a < 16, "conv", "_subclasses/fake_impls.py"),
    ],
    ids=["one size", "elements", "remainder", "convolution"],
)
def test_what_only_chose_strides_or_nothing_is_left_out(guard: Any) -> None:
    assert found(guard) == []


@pytest.mark.parametrize(
    "guard",
    [
        lambda a, b: asked(Ne(a + UNKNOWN, 1), "broadcast", "_refs/__init__.py"),
        lambda a, b: asked(Ne(a * UNKNOWN, 2), "broadcast", "_refs/__init__.py"),
        lambda a, b: asked(Eq(Mod(a - 2, 2), 0), "view", "_refs/__init__.py"),
    ],
    ids=["sum", "two", "multiple"],
)
def test_others_count(guard: Any) -> None:
    assert len(found(guard)) == 1

# SPDX-License-Identifier: Apache-2.0
"""What Inductor computes of the weights while it compiles, as a recipe: to be computed again at load.

    with recorded() as recipes: ... # compile with freezing
    recipes["_frozen_param3"]       # (("ops.mkldnn._reorder_linear_weight", [{"weight": "const_4"}, 32], {}),)
    values = cook(recipes, {"const_4": weight})

So the file has every weight once, and packed ones, which oneDNN lays out as this CPU likes them, need no
place in it. The same torch on the same kind of CPU packs as it did (both are checked at load).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from blade.errors import Refused
from blade.reason import Code

Step = tuple[str, list[Any], dict[str, Any]]
Recipes = dict[str, tuple[Step, ...]]
"""Name in the compiled graph -> calls in order, the last of which makes it. An argument {"weight": name}
is a constant, {"step": i} the result of call i, {"torch": name} a dtype or memory format."""


@contextmanager
def recorded() -> Iterator[Recipes]:
    """Filled with what is folded inside the block. Raises ``Refused`` there for what has no recipe."""
    from torch._inductor import constant_folding

    recipes: Recipes = {}
    replace = constant_folding.replace_node_with_constant

    def record(gm: GraphModule, node: Node, constant: Any = None, name: Any = None) -> None:
        steps: list[Step] = []
        _write(node, steps, {})
        known = set(dict(gm.named_buffers(recurse=False)))
        replace(gm, node, constant, name)
        (made,) = set(dict(gm.named_buffers(recurse=False))) - known
        recipes[made] = tuple(steps)

    with mock.patch.object(constant_folding, "replace_node_with_constant", record):
        yield recipes


def cook(recipes: Recipes, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything that ``recipes`` make, by name, in an order in which each has what it needs."""
    made: dict[str, torch.Tensor] = dict(weights)
    for name, steps in recipes.items():
        results: list[Any] = []
        for target, args, kwargs in steps:
            read = _Reader(made, results)
            call = attrgetter(target)(torch)
            results.append(call(*map(read, args), **{k: read(v) for k, v in kwargs.items()}))
        made[name] = results[-1]
    return {name: made[name] for name in recipes}


def needed_for(names: set[str], recipes: Recipes) -> Recipes:
    """Those of ``recipes`` that make ``names``, and what these are made of."""
    needed: Recipes = {}
    for name, steps in reversed(recipes.items()):  # what one reads was made before
        if name in names | ingredients(needed):
            needed[name] = steps
    return dict(reversed(needed.items()))


def ingredients(recipes: Recipes) -> set[str]:
    """The constants that ``recipes`` read, other than what they make."""
    read: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict) and "weight" in value:
            read.add(value["weight"])
        elif isinstance(value, (list, tuple)):
            for one in value:
                look(one)

    for steps in recipes.values():
        for _, args, kwargs in steps:
            look([*args, *kwargs.values()])
    return read - set(recipes)


def _write(node: Node, steps: list[Step], known: dict[Node, int]) -> None:
    """Append the calls that make ``node``, inputs first, each once."""
    target = _path(node)
    for source in node.all_input_nodes:
        if source.op != "get_attr" and source not in known:
            _write(source, steps, known)
    args = [_written(arg, known) for arg in node.args]
    kwargs = {name: _written(arg, known) for name, arg in node.kwargs.items()}
    known[node] = len(steps)
    steps.append((target, args, kwargs))


def _path(node: Node) -> str:
    """Where in ``torch`` the function of ``node`` is."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"ops.{node.target}"
    name = getattr(node.target, "__name__", "")
    if node.target is getattr(torch._C._nn, name, None):
        return f"_C._nn.{name}"
    raise _no_recipe(node)


def _written(value: Any, known: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        made = value in known
        return {"step": known[value]} if made else {"weight": str(value.target)}
    if isinstance(value, (list, tuple)):
        return [_written(one, known) for one in value]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _no_recipe(value)


def _no_recipe(what: object) -> Refused:
    detail = f"Inductor computes a constant with {what}, which cannot be repeated at load."
    return Refused(Code.CONVERSION_FAILED, detail)


class _Reader:
    """From an argument as it is written to the value."""

    def __init__(self, weights: Mapping[str, torch.Tensor], results: list[Any]) -> None:
        self._weights, self._results = weights, results

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        if kind == "weight":
            return self._weights[what]
        return self._results[what] if kind == "step" else getattr(torch, what)

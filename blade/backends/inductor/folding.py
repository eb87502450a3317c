# SPDX-License-Identifier: Apache-2.0
"""Record as a recipe what Inductor computes from the weights while it compiles, to repeat it at load.

    with recorded() as recipes: ... # compile with freezing
    recipes["_frozen_param3"]       # (("mkldnn._reorder_linear_weight", [{"weight": "const_4"}, 32], {}),)
    values = run_recipes(recipes, {"const_4": weight})

So the file contains every weight once, and no weights that oneDNN packed for this CPU. The same torch on the
same kind of CPU packs in the same way (both are checked at load).

A recipe in a file is untrusted text. It may call only ops of a few libraries that compute tensors from
tensors and numbers (``recipe_ops.find_op``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from blade.backends.inductor.recipe_ops import NAMED, TEXTS, find_op
from blade.core.reason import Code
from blade.errors import BackendError, Refused

RecipeStep = tuple[str, list[Any], dict[str, Any]]
Recipes = dict[str, tuple[RecipeStep, ...]]
"""Name in the compiled graph -> calls in order; the last one computes it. An argument {"weight": name} is a
constant, {"step": i} the result of call i, {"torch": name} a dtype or memory format."""


@contextmanager
def recorded() -> Iterator[Recipes]:
    """Recipes of everything folded inside the block. Folding without a recipe raises ``Refused`` there."""
    from torch._inductor import constant_folding

    recipes: Recipes = {}
    replace = constant_folding.replace_node_with_constant

    def record(gm: GraphModule, node: Node, constant: Any = None, name: Any = None) -> None:
        steps: list[RecipeStep] = []
        _write(node, steps, {})
        known = set(dict(gm.named_buffers(recurse=False)))
        replace(gm, node, constant, name)
        (made,) = set(dict(gm.named_buffers(recurse=False))) - known
        recipes[made] = tuple(steps)

    with mock.patch.object(constant_folding, "replace_node_with_constant", record):
        yield recipes


def run_recipes(recipes: Recipes, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the results of all ``recipes``, by name, each after those it depends on.

    Raises ``BackendError`` if a recipe fails, or calls an op that ``find_op`` does not find.
    """
    made: dict[str, torch.Tensor] = dict(weights)
    try:
        for name, steps in recipes.items():
            results: list[Any] = []
            for target, args, kwargs in steps:
                read = _RecipeReader(made, results)
                call = find_op(target)
                results.append(call(*map(read, args), **{k: read(v) for k, v in kwargs.items()}))
            if not isinstance(results[-1], torch.Tensor):
                raise ValueError(f"{name} is no tensor")
            made[name] = results[-1]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise BackendError(
            f"a constant of AOTInductor's code cannot be computed: {first}"
        ) from error
    return {name: made[name] for name in recipes}


def needed_for(names: set[str], recipes: Recipes) -> Recipes:
    """The ``recipes`` that compute ``names``, and those that these depend on."""
    needed: Recipes = {}
    for name, steps in reversed(recipes.items()):  # a recipe reads results of earlier ones
        if name in names | constants_read(needed):
            needed[name] = steps
    return dict(reversed(needed.items()))


def constants_read(recipes: Recipes) -> set[str]:
    """The constants that ``recipes`` read, except their own results."""
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


def _write(node: Node, steps: list[RecipeStep], known: dict[Node, int]) -> None:
    """Append the calls that compute ``node``, inputs first, each once."""
    target = _path(node)
    for source in node.all_input_nodes:
        if source.op != "get_attr" and source not in known:
            _write(source, steps, known)
    args = [_written(arg, known) for arg in node.args]
    kwargs = {name: _written(arg, known) for name, arg in node.kwargs.items()}
    known[node] = len(steps)
    steps.append((target, args, kwargs))


def _path(node: Node) -> str:
    """The op's name, in the form that ``find_op`` takes."""
    name = str(node.target)
    if not isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        own = getattr(node.target, "__name__", "")
        if node.target is not getattr(torch._C._nn, own, None):
            raise _no_recipe(node)
        name = f"aten.{own}"  # torch._C._nn has the same functions without their overloads
    try:
        find_op(name)
    except ValueError as error:
        raise _no_recipe(node) from error
    return name


def _written(value: Any, known: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        made = value in known
        return {"step": known[value]} if made else {"weight": str(value.target)}
    if isinstance(value, (list, tuple)):
        return [_written(one, known) for one in value]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float)) or value in TEXTS:
        return value
    raise _no_recipe(value)


def _no_recipe(what: object) -> Refused:
    detail = f"Inductor computes a constant with {what}, which cannot be repeated at load."
    return Refused(Code.CONVERSION_FAILED, detail)


class _RecipeReader:
    """Translates written arguments to values."""

    def __init__(self, weights: Mapping[str, torch.Tensor], results: list[Any]) -> None:
        self._weights, self._results = weights, results

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self(one) for one in value]
        if isinstance(value, str) and value not in TEXTS:
            raise ValueError(f"an op is given the text {value!r}")
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        places: dict[str, Any] = {"weight": self._weights, "step": self._results, "torch": NAMED}
        return places[kind][what]

# SPDX-License-Identifier: Apache-2.0
"""Makes a ScriptModule whose forward is a given graph without attributes.

module = script_of(graph, "BertModel", ["input_ids"], {"embeddings.weight": tensor})
module(input_ids)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blade.core import torchscript
from blade.graph.torchscript.extract import clear

_BY_NAME: Mapping[str, torch.Tensor] = {}
_OF_TENSORS = re.compile(r"(?:(?:Tensor|Tuple|List|Dict|Optional|str|int|float|bool)\b|[\[\], ])+")

Defaults = Mapping[str, Any]
"""Default values of parameters, by name: bool, int, float, str or ``None``."""

_NO_DEFAULTS: Defaults = {}


def script_of(
    graph: torch._C.Graph,
    name: str,
    inputs: Sequence[str],
    constants: Mapping[str, torch.Tensor | None] = _BY_NAME,
    defaults: Defaults = _NO_DEFAULTS,
) -> torch.jit.ScriptModule:
    """A module without attributes; ``name`` is the name of its class.

    The first inputs of ``graph`` are the module's ``inputs``, the others its ``constants``; ``None`` is a
    constant that is never read. No input behind one of the ``defaults`` may be without. ``graph`` returns one
    value and stays unchanged.
    """
    holder = type(name, (nn.Module,), {})().eval()
    script = torchscript.without_methods(holder)
    script.define(_stub(graph, inputs, defaults))
    module = _frozen(script)  # drops the attributes that every nn.Module has
    target: Any = module.graph
    clear(target)
    target.setInsertPoint(target.block())
    parameters = list(target.inputs())[1:]
    for value, called in zip(parameters, inputs, strict=True):
        value.setDebugName(called)
    given = [_placed(target, *constant) for constant in constants.items()]
    [result] = target.insertGraph(graph, [*parameters, *given])
    target.registerOutput(result)
    torchscript.remove_dead_code(target)
    target.lint()
    return module


def copy_of_script(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule | None:
    """A copy of ``module`` with a class and graph of its own; ``None`` if it takes or returns other values
    than tensors, numbers and strings.

    ``module`` has a forward and no attributes. Tensors are shared, and torch's passes do not compare them.
    """
    given: Any = module.graph.inputs()
    this, *inputs = given
    arguments = module._c._get_method("forward").schema.arguments[1:]
    kinds = [value.type().annotation_str for value in (*inputs, *module.graph.outputs())]
    if this.uses() or not all(map(_OF_TENSORS.fullmatch, kinds)):
        return None
    graph: Any = module.graph.copy()
    graph.eraseInput(0)
    names = [argument.name for argument in arguments]
    return script_of(graph, module.original_name, names, defaults=defaults_of(module))


def defaults_of(module: torch.jit.ScriptModule) -> Defaults:
    """The defaults of ``module``'s forward, by parameter."""
    arguments = module._c._get_method("forward").schema.arguments
    return {one.name: one.default_value for one in arguments if one.has_default_value()}


def simplified(graph: torch._C.Graph, inputs: Sequence[str]) -> torch._C.Graph:
    """``graph``, which takes ``inputs``, as freezing leaves it: inlined, without duplicate or dead code."""
    made: Any = _frozen(script_of(graph, "Simplified", inputs)).graph.copy()
    made.eraseInput(0)
    return made  # type: ignore[no-any-return]


def _frozen(script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    return torchscript.wrapped(torchscript.frozen(script._c, []))


def _placed(graph: Any, name: str, tensor: torch.Tensor | None) -> Any:
    value = graph.insertConstant(tensor)
    value.setDebugName(f"self.{name}")
    return value


def _stub(graph: torch._C.Graph, inputs: Sequence[str], defaults: Defaults) -> str:
    """Source of a forward with the types of ``graph``."""
    given: Any = list(graph.inputs())[: len(inputs)]
    kinds = [value.type().annotation_str for value in given]
    parameters = "".join(
        f", {name}: {kind}" + (f" = {defaults[name]!r}" if name in defaults else "")
        for name, kind in zip(inputs, kinds, strict=True)
    )
    made: Any = next(iter(graph.outputs()))
    result = made.type().annotation_str
    return f"def forward(self{parameters}) -> {result}:\n    raise RuntimeError('')\n"
